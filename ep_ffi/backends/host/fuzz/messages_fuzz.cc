// SPDX-License-Identifier: Apache-2.0

// Fuzzes the data from a peer: the messages on its socket, and its shared
// memory. Meanwhile two ops wait for the peer.
//
// Input: a sequence of messages. A header of eight bytes precedes each message:
// the kind of its descriptors, an unused byte, its length in two bytes, and
// four unused bytes. Messages are padded to eight bytes, so that a fuzzer that
// writes to a multiple of eight changes a whole field.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "ep_ffi/backends/host/fuzz/sample.h"
#include "ep_ffi/backends/host/testing/groups.h"
#include "ep_ffi/backends/host/transport/messages.h"
#include "ep_ffi/testing/fuzz.h"
#include "ep_ffi/testing/ranks.h"

namespace ep::host {
namespace {

using testing::RankInput;
using testing::Step;

const PlanDims kDims = SampleDims(/*ep_size=*/2);
constexpr testing::RowType kType = {3, DType::kFloat32};
constexpr int64_t kRun = 1;

// Returns the descriptor of a segment of one page. The page has the sample's
// staged choices, which a mover reads as rows.
int SampleSegment() {
  const SortedChoices choices = SampleSorted(kDims)[1];
  const int fd = memfd_create("sample", MFD_ALLOW_SEALING);
  const auto write = [&](const std::vector<int32_t>& words, off_t at) {
    const size_t bytes = words.size() * sizeof(words[0]);
    Require(pwrite(fd, words.data(), bytes, at) == ssize_t(bytes), "it fits");
  };
  write(choices.starts, 0);
  write(choices.order, 64);  // see Signature::second_offset
  Require(ftruncate(fd, sysconf(_SC_PAGESIZE)) == 0 &&
              fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0,
          "there is a segment");
  return fd;
}

// Aborts unless `mem` satisfies the invariants of a plan of rank 0.
void RequireSane(const std::vector<std::byte>& mem) {
  Plan plan;
  Require(Plan::Open(kDims, /*rank=*/0, mem.data(), mem.size(), &plan).ok(),
          "a plan opens");
  const auto in_bounds = [&](const Route& route, int64_t count) {
    return (route.rank == -1 && route.index == -1) ||
           (route.rank >= 0 && route.rank < kDims.ep_size && route.index >= 0 &&
            route.index < count);
  };
  for (int64_t i = 0; i < kDims.num_choices(); ++i) {
    Require(in_bounds(plan.send()[i], kDims.capacity), "tokens go to slots");
  }
  for (int64_t i = 0; i < kDims.capacity; ++i) {
    Require(in_bounds(plan.recv()[i], kDims.num_choices()),
            "slots hold choices");
  }
}

// Two ops of rank 0 that wait for an impostor.
class Conversation {
 public:
  // Posts ep_prepare and ep_combine on rank 0.
  Conversation() : group_({kDims, /*num_domains=*/2, /*timeout_s=*/20}) {
    const testing::Domain& domain = group_.domains[0];
    std::vector<RankInput> inputs(kDims.ep_size);
    for (int64_t rank = 0; rank < kDims.ep_size; ++rank) {
      inputs[rank].dims = kDims;
      inputs[rank].topk_idx = SampleChoices(kDims)[rank];
    }
    prepare_ = Step::Make(domain, Op::kPrepare, {kRun, /*position=*/0}, inputs);
    for (RankInput& input : inputs) {
      input.mem = testing::BuiltPlan(kDims, 0, SampleSorted(kDims)).mem;
      input.type = kType;
      input.data.rows.resize(kDims.capacity * kType.bytes());
      input.data.weights.resize(kDims.capacity);
    }
    combine_ = Step::Make(domain, Op::kCombine, {kRun, /*position=*/1}, inputs);
    prepare_->Post(0);
    combine_->Post(0);
  }

  Impostor& impostor() { return *group_.impostor; }

  // Disconnects the impostor, which completes both ops. Returns whether an op
  // succeeded.
  bool End() {
    impostor().Leave();
    const bool prepared = prepare_->Wait(0).ok();
    const bool combined = combine_->Wait(0).ok();
    if (prepared) RequireSane(prepare_->output(0).mem);
    return prepared || combined;
  }

 private:
  GroupWithImpostor group_;
  testing::StepPtr prepare_, combine_;
};

// Returns the file descriptors that a message of this kind carries.
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

// Encodes a message as a record of the fuzzer's input.
std::string Record(const Message& message, const std::string& text) {
  const std::string bytes = Encode(message, text);
  const char kind = message.type == Message::kSegment;  // see Descriptors
  std::string record = {kind, 0, static_cast<char>(bytes.size()),
                        static_cast<char>(bytes.size() >> 8)};
  record.resize(8);
  record += bytes;
  record.resize((record.size() + 7) / 8 * 8);
  return record;
}

std::string Record(Message::Type type, Code code, const std::string& text) {
  Message message = {};
  message.type = type;
  message.code = static_cast<int32_t>(code);
  message.launch.run_id = 1;
  return Record(message, text);
}

}  // namespace
}  // namespace ep::host

// Seeds are messages of the real process, changed to messages of the impostor.
std::vector<ep::testing::Seed> ep::testing::FuzzSeeds() {
  using namespace ep::host;
  Conversation conversation;
  std::string all, of_others;
  for (int i = 0; i < 4; ++i) {  // two segments, two posts
    Message message;
    std::string text;
    const std::string received = conversation.impostor().Receive();
    Require(Decode(received.data(), received.size(), &message, &text),
            "a message has come");
    message.rank = 1;
    all += Record(message, text);
    message.domain = 1;
    for (int32_t rank : {0, 1}) {
      message.rank = rank;
      of_others += Record(message, text);
    }
  }
  conversation.End();
  return {
      {"an exchange", all},
      {"an exchange of others", of_others, false},
      {"a failure",
       Record(Message::kFail, Code::kInvalidArgument, "bad ids") + all, false},
      {"a failure that is none", Record(Message::kFail, Code::kOk, "good ids"),
       false},
      {"a farewell",
       Record(Message::kRelease, Code::kOk, "") +
           Record(Message::kBye, Code::kOk, ""),
       false},
  };
}

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
