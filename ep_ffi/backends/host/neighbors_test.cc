// The host backend beside others on the same host: other users, other jobs.

#include <dirent.h>
#include <fcntl.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "ep_ffi/backends/host/testing/processes.h"
#include "ep_ffi/backends/host/wire.h"

namespace ep::host {
namespace {

constexpr double kTimeoutS = 30;  // which nobody waits for
constexpr int32_t kObserver = kNumRanks - 1;

// Does something as another user, in a process with one thread.
void AsNobody(const std::function<void()>& act) {
  constexpr int kNobody = 65534, kNotAllowed = 77;
  const pid_t child = fork();
  if (child == 0) {
    if (setgroups(0, nullptr) != 0 || setgid(kNobody) != 0 ||
        setuid(kNobody) != 0) {
      _exit(kNotAllowed);
    }
    act();
    _exit(::testing::Test::HasFailure());
  }
  int status;
  EXPECT_EQ(child, waitpid(child, &status, 0));
  if (WIFEXITED(status) && WEXITSTATUS(status) == kNotAllowed) {
    std::cout << "[  SKIPPED ] only root may act as another user" << std::endl;
    return;
  }
  EXPECT_EQ(0, status);
}

// Says that it is the observer, with the right secret even.
void ExpectTurnedAway(const std::string& secret, int32_t process) {
  sockaddr_un address;
  const socklen_t size = AddressOf(secret, process, &address);
  ASSERT_TRUE(WaitFor(kTimeoutS, [&] {
    return !Lines("/proc/net/unix", address.sun_path + 1).empty();
  })) << "everybody can read the names of sockets";
  const int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);
  ASSERT_EQ(0, connect(fd, reinterpret_cast<sockaddr*>(&address), size));
  Hello hello = MakeHello(secret, kObserver);
  (void)send(fd, &hello, sizeof(hello), MSG_NOSIGNAL);
  EXPECT_LE(recv(fd, &hello, sizeof(hello), 0), 0);
  close(fd);
}

TEST(NeighborsTest, AnotherUserIsTurnedAway) {
  World world;
  ExpectNothingSaid(world.Run([](Rank& rank) {
    if (rank.rank() == kObserver) {
      AsNobody([&] {
        for (int32_t r = 0; r < kObserver; ++r) {
          ExpectTurnedAway(rank.SecretOf(kNumRanks), r);
        }
      });
    }
    rank.Bootstrap(kTimeoutS);
    for (int64_t i = 0; i < 2 * kNumOps; ++i) rank.Next();
    return rank.Close();
  }));
}

// A group of all but the observer, who looks at them while they have it.
void Observe(const std::function<void(Rank&)>& act) {
  World world;
  ExpectNothingSaid(world.Run([&](Rank& rank) {
    if (rank.rank() == kObserver) {
      rank.WaitForOthers(kObserver, [](auto& r) { return r.completed > 5; });
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

TEST(NeighborsTest, AnotherUserCannotOpenWhatRanksShare) {
  Observe([](Rank& rank) {
    AsNobody([&] {
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

// So that even a SIGKILL leaves nothing behind.
TEST(NeighborsTest, SegmentsHaveNeitherNamesNorDescriptors) {
  Observe([](Rank& rank) {
    for (int32_t r = 0; r < kObserver; ++r) {
      const std::string proc = StrCat("/proc/", rank.records()[r].pid);
      const std::string maps = proc + "/maps";
      EXPECT_NE("", Lines(maps, "/memfd:ep_ffi (deleted)"));
      EXPECT_EQ(Lines(maps, "ep_ffi (deleted)"), Lines(maps, "memfd:ep_ffi"));
      EXPECT_EQ("", Lines(maps, "/dev/shm/") + Lines(maps, "/tmp/ep"));
      for (int fd = 0; fd < 100; ++fd) {
        char target[256] = {};
        (void)!readlink(StrCat(proc, "/fd/", fd).c_str(), target, 255);
        EXPECT_EQ(nullptr, std::strstr(target, "memfd:")) << target;
      }
    }
  });
}

// In one of two jobs ranks die; the other, of the same group names, goes on.
TEST(NeighborsTest, JobsDoNotMeet) {
  const pid_t other = fork();
  if (other == 0) {
    for (int i = 0; i < 20 / kFewer; ++i) {
      World world;
      world.Run([](Rank& rank) -> std::string {
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
  World world;
  ExpectNothingSaid(world.Run([](Rank& rank) {
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
