// SPDX-License-Identifier: Apache-2.0

// Fuzzes what a peer sends: messages on its socket, and the memory it shares.
// Input: a sequence of messages. Eight bytes come before each: the descriptors
// that it carries, a byte that is unused, its length in two bytes, and four
// more unused ones. A message is padded to eight bytes, so that a fuzzer
// changes a whole field where it writes to a multiple of eight. While messages
// come, two ops wait for this peer.

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "ep_ffi/backends/host/fuzz/conversation.h"
#include "ep_ffi/backends/host/fuzz/sample.h"

namespace ep::host {
namespace {

// Returns the descriptors that may come with a message.
std::vector<int> Descriptors(uint8_t kind) {
  static const int segment = SampleSegment();
  static const int unsealed = memfd_create("unsealed", MFD_ALLOW_SEALING);
  static int pipe_ends[2] = {-1, -1};
  if (pipe_ends[0] < 0) Require(pipe(pipe_ends) == 0, "there are pipes");
  switch (kind % 8) {
    case 1:
      return {segment};
    case 2:
      return {unsealed};
    case 3:
      return {pipe_ends[0]};
    case 4:
      return {segment, pipe_ends[0], unsealed};
    default:
      return {};
  }
}

}  // namespace
}  // namespace ep::host

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace ep::host;
  Conversation conversation;
  while (size >= 8) {
    const std::vector<int> fds = Descriptors(data[0]);
    const size_t claimed = data[2] | data[3] << 8;
    const size_t length = std::min(claimed, size - 8);
    const auto* bytes = reinterpret_cast<const char*>(data + 8);
    conversation.impostor().Send(std::string(bytes, length), fds);
    const size_t step = std::min(size, 8 + (length + 7) / 8 * 8);
    data += step;
    size -= step;
  }
  const bool accepted = conversation.End();
  Require(!::testing::Test::HasFailure(), "every op ends, once");
  return accepted ? 0 : -1;
}
