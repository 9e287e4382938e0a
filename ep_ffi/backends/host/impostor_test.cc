// SPDX-License-Identifier: Apache-2.0

// Tests that a group fails with a clear error, and without other harm, if a
// peer violates the protocol or a system call fails. The fuzz targets search
// for more cases.

#include <dirent.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "ep_ffi/backends/host/testing/groups.h"
#include "ep_ffi/backends/host/transport/messages.h"
#include "ep_ffi/backends/host/transport/segment.h"
#include "ep_ffi/testing/expect.h"

namespace ep::host {
namespace {

using testing::ExpectFailure;
using testing::RankInput;
using testing::Step;
using testing::StepPtr;

// Many tokens, so that reading the choices of a rank takes a while.
constexpr PlanDims kDims = {
    /*num_experts=*/2,    /*ep_size=*/2,
    /*num_tokens=*/10000, /*top_k=*/1,
    /*capacity=*/20000,   /*alignment=*/1,
    /*drop=*/true};

// Posts ep_prepare on rank 0.
StepPtr Prepare(const GroupWithImpostor& group, int64_t run_id) {
  std::vector<RankInput> inputs(kDims.ep_size);
  for (RankInput& input : inputs) {
    input.dims = kDims;
    input.topk_idx.resize(kDims.num_choices(), 0);
  }
  const StepPtr step =
      Step::Make(group.domains[0], Op::kPrepare, {run_id}, inputs);
  step->Post(0);
  return step;
}

// Returns the next post of the real process, changed to a post of the impostor.
Message NextPost(Impostor& impostor) {
  Message message = {};
  std::string text;
  do {
    const std::string bytes = impostor.Receive();
    if (!Decode(bytes.data(), bytes.size(), &message, &text)) {
      ADD_FAILURE() << "no post came";
      break;
    }
  } while (message.type != Message::kPost);
  message.rank = 1;
  return message;
}

// A shared-memory segment of the impostor.
struct Shared {
  explicit Shared(const GroupWithImpostor& group) : impostor(*group.impostor) {
    testing::ExpectOk(pool.Acquire(1, /*readers=*/{0}, &segment, &fd));
  }
  static void Announce(Impostor& impostor, const std::vector<int>& fds) {
    Message message = {};
    message.type = Message::kSegment;
    impostor.Send(Encode(message, ""), fds);
  }
  void Announce() const { Announce(impostor, {fd.get()}); }

  Impostor& impostor;
  SegmentPool pool;
  Segment* segment;
  Fd fd;
};

size_t CountDescriptors() {
  DIR* entries = opendir("/proc/self/fd");
  size_t count = 0;
  while (readdir(entries)) ++count;
  closedir(entries);
  return count;
}

TEST(ImpostorTest, KeepsNoDescriptor) {
  const GroupWithImpostor group({kDims});
  const size_t before = CountDescriptors();
  for (int i = 0; i < 10; ++i) Shared::Announce(*group.impostor, {0, 0, 0});
  group.impostor->Send("", {0});
  group.impostor->Leave();
  EXPECT_EQ(Code::kUnavailable, Prepare(group, 1)->Wait(0).code());
  EXPECT_LT(CountDescriptors(), before);  // the impostor has closed its socket
}

// A peer may write to its segment while this process reads the segment.
TEST(ImpostorTest, ChangingChoicesGiveAValidPlanOrAnError) {
  const GroupWithImpostor group({kDims});
  const Shared shared(group);
  std::byte* bytes = shared.segment->memory.data();
  auto* starts = reinterpret_cast<volatile int32_t*>(bytes);
  auto* order = reinterpret_cast<volatile int32_t*>(bytes + 64);
  shared.Announce();
  starts[2] = kDims.num_choices();
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (int64_t i = 0; !stop; ++i) {
      const bool valid = i % 2;
      starts[1] = valid ? kDims.num_choices() : INT32_MAX;
      order[kDims.num_choices() / 2] = valid ? 0 : INT32_MIN;
    }
  });
  int accepted = 0;
  for (int64_t run_id = 1; run_id <= 300; ++run_id) {
    const StepPtr prepare = Prepare(group, run_id);
    Message post = NextPost(*group.impostor);
    post.segment = 0;
    group.impostor->Send(Encode(post, ""));
    const Status status = prepare->Wait(0);
    if (!status.ok()) {
      EXPECT_EQ(Code::kInternal, status.code()) << status.message();
      continue;
    }
    ++accepted;
    Plan plan;
    const std::vector<std::byte>& mem = prepare->output(0).mem;
    ASSERT_TRUE(Plan::Open(kDims, 0, mem.data(), mem.size(), &plan).ok());
    for (int64_t slot = 0; slot < kDims.capacity; ++slot) {
      const Route& route = plan.recv()[slot];
      ASSERT_GE(route.index, -1);
      ASSERT_LT(route.index, kDims.num_choices());
    }
  }
  stop = true;
  writer.join();
  EXPECT_GT(accepted, 0);
}

// Lowers a resource limit of this process while the object lives.
class Limit {
 public:
  Limit(decltype(RLIMIT_NOFILE) resource, rlim_t most) : resource_(resource) {
    EXPECT_EQ(0, getrlimit(resource_, &before_));
    const rlimit lower = {most, before_.rlim_max};
    EXPECT_EQ(0, setrlimit(resource_, &lower));
  }
  ~Limit() { setrlimit(resource_, &before_); }

 private:
  const decltype(RLIMIT_NOFILE) resource_;
  rlimit before_;
};

TEST(LimitsTest, TheErrorOfASenderNamesTheLimitToRaise) {
  signal(SIGXFSZ, SIG_IGN);  // as Python does
  const GroupWithImpostor group({kDims});
  Status no_files, no_size;
  {
    const Limit limit(RLIMIT_NOFILE, 0);
    no_files = Prepare(group, /*run_id=*/1)->Wait(0);
  }
  {
    const Limit limit(RLIMIT_FSIZE, 1000);
    no_size = Prepare(group, /*run_id=*/2)->Wait(0);
  }
  const std::string op = "ep_prepare(layer";
  ExpectFailure(
      {Code::kResourceExhausted, {op, "Too many open files", "ulimit -n"}},
      no_files);
  ExpectFailure({Code::kResourceExhausted, {op, "File too large", "ulimit -f"}},
                no_size);
}

TEST(LimitsTest, TheErrorOfAReceiverNamesTheLimitToRaise) {
  const GroupWithImpostor group({kDims});
  const StepPtr prepare = Prepare(group, /*run_id=*/1);
  const Shared shared(group);
  Message post = NextPost(*group.impostor);
  post.segment = 0;
  Status status;
  {
    // With a limit of 0, the impostor could not send the descriptor.
    const Limit limit(RLIMIT_NOFILE, 1000);
    std::vector<Fd> others;
    do {
      others.emplace_back(dup(shared.fd.get()));
    } while (others.back().get() >= 0);
    shared.Announce();
    group.impostor->Send(Encode(post, ""));
    status = prepare->Wait(0);
  }
  ExpectFailure(
      {Code::kResourceExhausted, {"Too many open files", "ulimit -n"}}, status);
}

}  // namespace
}  // namespace ep::host
