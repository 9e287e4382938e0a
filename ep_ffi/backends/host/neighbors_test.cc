// SPDX-License-Identifier: Apache-2.0

// Tests the host backend beside other users and other jobs on the same host.

#include <dirent.h>
#include <fcntl.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <deque>
#include <iostream>
#include <optional>
#include <sstream>

#include "ep_ffi/backends/host/testing/listener.h"
#include "ep_ffi/backends/host/testing/processes.h"
#include "ep_ffi/backends/host/transport/messages.h"
#include "ep_ffi/backends/host/transport/peers.h"
#include "ep_ffi/testing/expect.h"

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
    } else if (!is_ended_) {
      EXPECT_EQ(0, status);
    }
  }
  void End() { is_ended_ = kill(child_, SIGKILL) == 0; }

 private:
  static constexpr int kNotAllowed = 77;

  const pid_t child_;
  bool is_ended_ = false;
};

int Connect(const std::string& name) {
  sockaddr_un address;
  const socklen_t size = AddressOf(name, &address);
  const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0);
  (void)connect(fd, reinterpret_cast<sockaddr*>(&address), size);
  return fd;
}

// Connects to the other ranks with the observer's number, before the observer
// connects. Expects that the ranks close these connections immediately.
void ExpectTurnedAway(const Records& records, int connected) {
  std::vector<int> sockets;
  const Hello hello = {kObserver};
  for (int32_t r = 0; r < kObserver; ++r) {
    const std::string name = records[r].addresses[1].name;
    EXPECT_NE("", Lines("/proc/net/unix", name))
        << "everybody can read the names of sockets";
    sockets.push_back(Connect(name));
    EXPECT_LT(0, send(sockets.back(), &hello, sizeof(hello), MSG_NOSIGNAL));
  }
  close(connected);
  for (int fd : sockets) {
    pollfd hung_up = {fd, 0, 0};
    EXPECT_EQ(1, poll(&hung_up, 1, static_cast<int>(kTimeoutS * 1e3)));
    Hello answer;
    EXPECT_LE(recv(fd, &answer, sizeof(answer), 0), 0);
  }
}

TEST(NeighborsTest, RanksRejectAnotherUser) {
  Job job;
  ExpectNothingSaid(job.Run([](Rank& rank) {
    std::optional<Nobody> nobody;
    if (rank.rank() == kObserver) {
      const auto told = [](auto& r) {
        return r.addresses[1].is_published.load();
      };
      rank.WaitForOthers(kObserver, told);
      int connected[2];
      EXPECT_EQ(0, pipe(connected));
      nobody.emplace([&] { ExpectTurnedAway(rank.records(), connected[1]); });
      close(connected[1]);
      char nothing;
      EXPECT_EQ(0,
                read(connected[0], &nothing, 1));  // until `nobody` closes it
      close(connected[0]);
    }
    rank.Bootstrap(kTimeoutS);
    for (int64_t i = 0; i < 2 * kNumOps; ++i) rank.Next();
    return rank.Close();
  }));
}

// Another user listens at the address of a process of the group.
TEST(NeighborsTest, SendsNothingToAnotherUser) {
  int told[2];
  ASSERT_EQ(0, pipe(told));
  const Nobody nobody([&] {
    const Listener listener;
    EXPECT_LT(0, write(told[1], listener.name.data(), listener.name.size()));
    const int fd = accept(listener.socket.get(), nullptr, nullptr);
    char byte;
    EXPECT_EQ(0, recv(fd, &byte, 1, 0));
  });
  close(told[1]);
  char name[64] = {};
  if (read(told[0], name, sizeof(name)) > 0) {
    const Listener mine;
    std::unique_ptr<Peers> peers;
    const Topology topology = {/*process=*/1,
                               /*ep_size=*/2,
                               {{name, 0, 0}, {mine.name, 1, 0}},
                               /*members=*/{}};
    testing::ExpectFailure({Code::kUnavailable, {"process 0 gave up"}},
                           Peers::Connect(topology, mine.socket.get(),
                                          kTimeoutS, /*tick_s=*/1, &peers));
  }
  close(told[0]);
}

// Disturbs a bootstrap: connects to all listening sockets, binds their names
// and similar names, and keeps up to 500 sockets open.
[[noreturn]] void Disturb() {
  std::deque<int> held;
  while (true) {
    std::istringstream lines(Lines("/proc/net/unix", "@ep_ffi-"));
    for (std::string line; std::getline(lines, line);) {
      std::string name = line.substr(line.find('@') + 1);
      for (int i = 0; i < 10; ++i) held.push_back(Connect(name));
      for (char c = '0'; c <= '9'; ++c) {
        name.back() = c;
        sockaddr_un address;
        const socklen_t size = AddressOf(name, &address);
        held.push_back(socket(AF_UNIX, SOCK_SEQPACKET, 0));
        (void)bind(held.back(), reinterpret_cast<sockaddr*>(&address), size);
      }
    }
    for (; held.size() > 500; held.pop_front()) close(held.front());
  }
}

// Each rank closes the group after its last op, while peers may read its rows.
TEST(NeighborsTest, AnotherUserCannotStopABootstrap) {
  for (int i = 0; i < 10; ++i) {
    Job job;
    Nobody nobody(Disturb);
    ExpectNothingSaid(job.Run([](Rank& rank) {
      rank.Bootstrap(kTimeoutS);
      for (int64_t j = 0; j < kNumOps; ++j) rank.Next();
      return rank.Close();
    }));
    nobody.End();
  }
}

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
