// SPDX-License-Identifier: Apache-2.0

// Tests the host backend beside other users and other jobs on the same host.

#include <dirent.h>
#include <fcntl.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <iostream>
#include <sstream>

#include "ep_ffi/backends/host/testing/processes.h"

namespace ep::host {
namespace {

constexpr double kTimeoutS = 30;  // longer than any wait in this test
constexpr int32_t kObserver = kNumRanks - 1;

// A child process that calls a function as another user.
class Nobody {
 public:
  explicit Nobody(const std::function<void()>& act) : child_(fork()) {
    if (child_ != 0) return;
    constexpr int kId = 65534;
    if (setgroups(0, nullptr) != 0 || setgid(kId) != 0 || setuid(kId) != 0) {
      _exit(kNotAllowed);
    }
    act();
    _exit(::testing::Test::HasFailure());
  }
  ~Nobody() {
    int status;
    EXPECT_EQ(child_, waitpid(child_, &status, 0));
    if (WIFEXITED(status) && WEXITSTATUS(status) == kNotAllowed) {
      std::cout << "[  SKIPPED ] only root may act as another user\n";
    } else {
      EXPECT_EQ(0, status);
    }
  }

 private:
  static constexpr int kNotAllowed = 77;

  const pid_t child_;
};

// Runs `act` on the observer, which is not in the group, after the other ranks
// have run their ops and before they close the group.
void Observe(const std::function<void(Rank&)>& act) {
  Job job;
  ExpectNothingSaid(job.Run([&](Rank& rank) {
    if (rank.rank() == kObserver) {
      rank.WaitForOthers(kObserver,
                         [](auto& r) { return r.completed == 2 * kNumOps; });
      act(rank);
      ++rank.record().completed;
      return std::string();
    }
    rank.Bootstrap(kTimeoutS, {0, 1, 2});
    for (int64_t i = 0; i < 2 * kNumOps; ++i) rank.Next();
    EXPECT_TRUE(WaitFor(
        kTimeoutS, [&] { return rank.records()[kObserver].completed > 0; }));
    return rank.Close();
  }));
}

TEST(NeighborsTest, AnotherUserCannotOpenSharedMemory) {
  Observe([](Rank& rank) {
    const Nobody nobody([&] {
      for (int32_t r = 0; r < kObserver; ++r) {
        const pid_t pid = rank.records()[r].pid;
        const std::string proc = StrCat("/proc/", pid);
        EXPECT_EQ(nullptr, opendir((proc + "/fd").c_str()));
        EXPECT_EQ(nullptr, opendir((proc + "/map_files").c_str()));
        EXPECT_EQ(-1, open((proc + "/mem").c_str(), O_RDONLY));
        char byte;
        iovec here = {&byte, 1}, there = {&rank, 1};
        EXPECT_EQ(-1, process_vm_readv(pid, &here, 1, &there, 1, 0));
      }
    });
  });
}

// The kernel frees an unnamed segment with its processes, even after SIGKILL.
TEST(NeighborsTest, SegmentsHaveNeitherNamesNorDescriptors) {
  Observe([](Rank& rank) {
    for (int32_t r = 0; r < kObserver; ++r) {
      const std::string proc = StrCat("/proc/", rank.records()[r].pid);
      std::istringstream maps(Lines(proc + "/maps", ""));
      int segments = 0;
      for (std::string line; std::getline(maps, line);) {
        const bool is_segment =
            line.find("/memfd:ep_ffi (deleted)") != std::string::npos;
        segments += is_segment;
        EXPECT_EQ(is_segment, line.find("ep_ffi (") != std::string::npos);
        for (const char* folder : {"/dev/shm/", "/tmp/ep"}) {
          EXPECT_EQ(std::string::npos, line.find(folder)) << line;
        }
      }
      EXPECT_GT(segments, 0);
      for (int fd = 0; fd < 100; ++fd) {
        char target[256] = {};
        (void)!readlink(StrCat(proc, "/fd/", fd).c_str(), target, 255);
        EXPECT_EQ(nullptr, std::strstr(target, "memfd:")) << target;
      }
    }
  });
}

// Ranks of one job die. Another job with the same group names continues.
TEST(NeighborsTest, JobsDoNotDisturbEachOther) {
  const pid_t other = fork();
  if (other == 0) {
    for (int i = 0; i < 20 / kFewer; ++i) {
      Job job;
      job.Run([](Rank& rank) -> std::string {
        rank.Bootstrap(kTimeoutS);
        if (rank.rank() == 1) {
          for (int64_t j = 0; j < kNumOps; ++j) rank.Next();
          rank.Die(Way::kKill);
        }
        while (rank.status().ok()) rank.Next();
        rank.Close();
        return "";
      });
    }
    _exit(::testing::Test::HasFailure());
  }
  Job job;
  ExpectNothingSaid(job.Run([](Rank& rank) {
    rank.Bootstrap(kTimeoutS);
    for (int64_t i = 0; i < 500 / kFewer; ++i) rank.Next();
    return rank.Close();
  }));
  int status;
  EXPECT_EQ(other, waitpid(other, &status, 0));
  EXPECT_EQ(0, status);
}

}  // namespace
}  // namespace ep::host
