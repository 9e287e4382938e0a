// A peer that is not what it seems: the group fails, and nothing worse. What
// nobody thought of is for the fuzz targets.

#include "ep_ffi/backends/host/testing/impostor.h"

#include <dirent.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "ep_ffi/backends/host/segment.h"
#include "ep_ffi/backends/host/wire.h"
#include "ep_ffi/core/plan.h"
#include "ep_ffi/testing/samples.h"

namespace ep::host {
namespace {

using testing::RankInput;
using testing::Step;
using testing::StepPtr;

// So many choices that they are not read in no time.
constexpr PlanDims kDims = {
    /*num_experts=*/2,    /*ep_size=*/2,
    /*num_tokens=*/10000, /*top_k=*/1,
    /*capacity=*/20000,   /*alignment=*/1,
    /*drop=*/true};

// Rank 0 posts ep_prepare.
StepPtr Prepare(const Besieged& group, int64_t run_id) {
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

// What the real process says next; the impostor's own post looks the same.
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

TEST(ImpostorTest, AFailureWithoutAnErrorIsNoSuccess) {
  const Besieged group({kDims});
  const StepPtr prepare = Prepare(group, /*run_id=*/1);
  Message fail = {};
  fail.type = Message::kFail;
  fail.code = static_cast<int32_t>(Code::kOk);
  fail.launch.run_id = 1;
  group.impostor->Send(Encode(fail, ""));
  EXPECT_EQ(Code::kUnavailable, prepare->Wait(0).code());
}

// The impostor has all ranks of the second domain, and posts as each of them.
TEST(ImpostorTest, PostsInADomainOfOthersFailTheirRun) {
  const Besieged group({kDims, /*num_domains=*/2});
  const StepPtr prepare = Prepare(group, /*run_id=*/1);
  Message segment = {};
  segment.type = Message::kSegment;
  SegmentPool pool;
  int fd;
  ASSERT_NE(nullptr, pool.Acquire(1, 1, &fd));
  group.impostor->Send(Encode(segment, ""), {fd});
  close(fd);
  Message post = NextPost(*group.impostor);
  post.segment = 0;
  post.domain = 1;
  for (int32_t rank : {0, 1}) {
    post.rank = rank;
    group.impostor->Send(Encode(post, ""));
  }
  EXPECT_EQ(Code::kInternal, prepare->Wait(0).code());
}

TEST(ImpostorTest, GarbageEndsTheConnection) {
  const Besieged group({kDims});
  const auto begin = std::chrono::steady_clock::now();
  group.impostor->Send("garbage");
  EXPECT_EQ("", group.impostor->Receive());
  EXPECT_LT(std::chrono::steady_clock::now() - begin,
            std::chrono::milliseconds(900))
      << "it waited in vain instead";
}

TEST(ImpostorTest, NoDescriptorIsKept) {
  const auto count = [] {
    DIR* folder = opendir("/proc/self/fd");
    int n = 0;
    while (readdir(folder)) ++n;
    closedir(folder);
    return n;
  };
  const Besieged group({kDims});
  const int before = count();
  Message segment = {};
  segment.type = Message::kSegment;
  for (int i = 0; i < 10; ++i) {
    group.impostor->Send(Encode(segment, ""), {0, 0, 0});
  }
  group.impostor->Leave();
  EXPECT_EQ(Code::kUnavailable, Prepare(group, 1)->Wait(0).code());
  EXPECT_LE(count(), before);
}

// A peer may write to its segment while it is read here.
TEST(ImpostorTest, ChoicesThatChangeLeadNowhere) {
  const Besieged group({kDims});
  SegmentPool pool;
  int fd;
  std::byte* shared = pool.Acquire(1, 1, &fd)->memory.data();
  auto* starts = reinterpret_cast<volatile int32_t*>(shared);
  auto* order = reinterpret_cast<volatile int32_t*>(shared + 64);
  Message segment = {};
  segment.type = Message::kSegment;
  group.impostor->Send(Encode(segment, ""), {fd});
  close(fd);

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

}  // namespace
}  // namespace ep::host
