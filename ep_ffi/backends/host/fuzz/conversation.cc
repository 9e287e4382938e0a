// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/fuzz/conversation.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <vector>

#include "ep_ffi/backends/host/fuzz/sample.h"

namespace ep::host {
namespace {

using testing::RankInput;
using testing::Step;

const PlanDims kDims = SampleDims(/*ep_size=*/2);
constexpr testing::RowType kType = {3, DType::kFloat32};
constexpr int64_t kRun = 1;

}  // namespace

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

Conversation::Conversation()
    : group_({kDims, /*num_domains=*/2, /*timeout_s=*/20}) {
  const testing::Domain& domain = group_.domains[0];
  std::vector<RankInput> inputs = SampleInputs(kDims);
  prepare_ = Step::Make(domain, Op::kPrepare, {kRun, /*position=*/0}, inputs);
  for (RankInput& input : inputs) {
    input.mem = Build(kDims, 0, SampleSorted(kDims)).mem;
    input.type = kType;
    input.data.rows.resize(kDims.capacity * kType.bytes());
    input.data.weights.resize(kDims.capacity);
  }
  combine_ = Step::Make(domain, Op::kCombine, {kRun, /*position=*/1}, inputs);
  prepare_->Post(0);
  combine_->Post(0);
}

bool Conversation::End() {
  impostor().Leave();
  const bool prepared = prepare_->Wait(0).ok();
  const bool combined = combine_->Wait(0).ok();
  if (prepared) RequireSane(kDims, 0, prepare_->output(0).mem);
  return prepared || combined;
}

}  // namespace ep::host
