// SPDX-License-Identifier: Apache-2.0

// Tests connections between threads that act as processes.

#include "ep_ffi/backends/host/transport/peers.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>

#include "ep_ffi/backends/host/testing/listener.h"
#include "ep_ffi/testing/expect.h"
#include "ep_ffi/testing/ranks.h"

namespace ep::host {
namespace {

using testing::ExpectFailure;
using testing::ExpectOk;

constexpr double kTickS = 0.01;

Status Connect(const Listeners& listeners, const Topology& topology,
               std::unique_ptr<Peers>* out, double timeout_s = 30) {
  return Peers::Connect(topology, listeners.socket(topology.process), timeout_s,
                        kTickS, out);
}

std::vector<std::unique_ptr<Peers>> ConnectAll(int32_t num_processes) {
  const Listeners listeners(num_processes);
  std::vector<std::unique_ptr<Peers>> all(num_processes);
  testing::ForEachRank(num_processes, [&](int64_t p) {
    ExpectOk(Connect(listeners, listeners.TopologyOf(p), &all[p]));
  });
  return all;
}

// Records one line per message. A log must outlive the Peers that call it.
class Log {
 public:
  Peers::Callbacks Callbacks() {
    return {
        [this](int32_t process, const Message& m, const std::string& text,
               const Mapping* memory, const Status&) {
          Add(StrCat(
              "post ", m.launch.run_id, " of ", text, " from ", process, ": ",
              memory ? reinterpret_cast<char*>(memory->data()) : "nothing"));
        },
        [this](const Message& m, const std::string& text) {
          Add(StrCat("fail ", m.launch.run_id, " with ", m.code, ": ", text));
        },
        [this](int32_t process, bool is_orderly,
               const std::string& its_reason) {
          Add(StrCat(process, is_orderly ? " closed" : " died", its_reason));
        },
        [] {}};
  }

  void Expect(const std::vector<std::string>& expected) {
    const auto deadline =
        std::chrono::steady_clock::now() + std::chrono::seconds(30);
    MutexLock lock(mutex_);
    while (lines_.size() < expected.size() &&
           changed_.WaitUntil(mutex_, deadline)) {
    }
    EXPECT_EQ(expected, lines_);
  }

 private:
  void Add(std::string line) {
    MutexLock lock(mutex_);
    lines_.push_back(std::move(line));
    changed_.NotifyAll();
  }

  Mutex mutex_;
  CondVar changed_;
  std::vector<std::string> lines_ EP_GUARDED_BY(mutex_);
};

// Posts `text` as rows.
void Post(Peers* from, int32_t to, int64_t run_id, const char* text) {
  Segment* segment;
  ASSERT_TRUE(from->Acquire(std::strlen(text) + 1, {to}, &segment).ok());
  std::strcpy(reinterpret_cast<char*>(segment->memory.data()), text);
  Message message = {};
  message.launch.run_id = run_id;
  message.segment = segment->id;
  from->SendPost({to}, message, "op");
}

TEST(PeersTest, MessagesArriveInOrderWithTheirRows) {
  Log log;
  auto peers = ConnectAll(3);
  Post(peers[2].get(), 0, 7, "seven");
  Post(peers[2].get(), 0, 8, "eight");
  peers[2]->SendFail({0, 9, 0}, Status(Code::kInternal, "nine"));
  peers[2]->SendBye(", ten");
  peers[0]->Start(log.Callbacks());
  log.Expect({"post 7 of op from 2: seven", "post 8 of op from 2: eight",
              StrCat("fail 9 with ", int(Code::kInternal), ": nine"),
              "2 closed, ten"});
}

TEST(PeersTest, ASegmentNeedsOneDescriptorOfItsOwner) {
  Log log;
  auto peers = ConnectAll(3);
  rlimit before;
  ASSERT_EQ(0, getrlimit(RLIMIT_NOFILE, &before));
  const rlimit lower = {1000, before.rlim_max};
  ASSERT_EQ(0, setrlimit(RLIMIT_NOFILE, &lower));
  std::vector<Fd> others;
  do {
    others.emplace_back(dup(STDERR_FILENO));
  } while (others.back().get() >= 0);
  others.pop_back();  // the dup that failed
  others.pop_back();
  Post(peers[2].get(), 0, 7, "seven");
  others.clear();
  ASSERT_EQ(0, setrlimit(RLIMIT_NOFILE, &before));
  peers[0]->Start(log.Callbacks());
  log.Expect({"post 7 of op from 2: seven"});
}

TEST(PeersTest, SendersDoNotWaitForReceivers) {
  constexpr int kPosts = 5000;  // more than fit into a socket
  Log sender, receiver;
  auto peers = ConnectAll(2);
  peers[0]->Start(sender.Callbacks());
  std::vector<std::string> expected;
  for (int i = 0; i < kPosts; ++i) {
    peers[0]->SendFail({0, i, 0},
                       Status(Code::kInternal, std::string(500, 'x')));
    expected.push_back(StrCat("fail ", i, " with ", int(Code::kInternal), ": ",
                              std::string(500, 'x')));
  }
  peers[1]->Start(receiver.Callbacks());
  receiver.Expect(expected);
}

TEST(PeersTest, AReleasedSegmentIsUsedAgain) {
  Log log;
  auto peers = ConnectAll(2);
  peers[0]->Start(log.Callbacks());
  Segment *first, *second, *third;
  ASSERT_TRUE(peers[0]->Acquire(10, {1}, &first).ok());
  ASSERT_TRUE(peers[0]->Acquire(10, {1}, &second).ok());
  EXPECT_NE(first, second);
  peers[1]->SendRelease(0, first->id);
  // This message arrives after the release.
  peers[1]->SendFail({0, 1, 0}, Status(Code::kInternal, ""));
  log.Expect({StrCat("fail 1 with ", int(Code::kInternal), ": ")});
  ASSERT_TRUE(peers[0]->Acquire(10, {1}, &third).ok());
  EXPECT_EQ(first, third);
}

// If a peer closes a socket with unread messages, our next recvmsg fails,
// although messages of the peer may wait in our socket.
TEST(PeersTest, UnreadMessagesDoNotHideAnOrderlyClose) {
  Log log;
  auto peers = ConnectAll(2);
  Post(peers[0].get(), 1, 1, "unread");
  Post(peers[1].get(), 0, 2, "last words");
  peers[1]->SendBye("");
  peers[1].reset();
  peers[0]->Start(log.Callbacks());
  log.Expect({"post 2 of op from 1: last words", "1 closed"});
}

// Connects process 1 of 2 in a forked child, which then runs `body`.
pid_t Fork(const Listeners& listeners, const std::function<void()>& body) {
  const pid_t child = fork();
  if (child != 0) return child;
  std::unique_ptr<Peers> peers;
  (void)Connect(listeners, listeners.TopologyOf(1), &peers);
  body();
  _exit(0);
}

TEST(PeersTest, ReportsADeathThoughAChildHoldsTheSocketOpen) {
  const Listeners listeners(2);
  int until[2];  // the grandchild ends with this test
  ASSERT_EQ(0, pipe(until));
  const pid_t child = Fork(listeners, [&] {
    if (fork() != 0) raise(SIGKILL);
    close(until[1]);
    char nothing;
    (void)!read(until[0], &nothing, 1);
  });
  Log log;
  Topology topology = listeners.TopologyOf(0);
  topology.processes[1].pid = child;
  std::unique_ptr<Peers> peers;
  ASSERT_TRUE(Connect(listeners, topology, &peers).ok());
  peers->Start(log.Callbacks());
  log.Expect({"1 died"});
  close(until[1]);
  close(until[0]);
  EXPECT_EQ(child, waitpid(child, nullptr, 0));
}

TEST(PeersTest, ConnectingFailsSoonIfAProcessHasDied) {
  const pid_t child = fork();
  if (child == 0) _exit(0);
  for (int32_t process : {0, 1}) {  // accepts or connects
    const Listeners listeners(2);
    Topology topology = listeners.TopologyOf(process);
    topology.processes[1 - process].pid = child;
    std::unique_ptr<Peers> peers;
    ExpectFailure(
        {Code::kUnavailable, {StrCat("process ", 1 - process, " died")}},
        Connect(listeners, topology, &peers));
  }
  EXPECT_EQ(child, waitpid(child, nullptr, 0));
}

TEST(PeersTest, ConnectingFailsAtTheDeadlineIfAProcessIsAbsent) {
  for (int32_t process : {0, 1, 2}) {
    const Listeners listeners(3);
    std::unique_ptr<Peers> peers;
    ExpectFailure(
        {Code::kDeadlineExceeded, {"timeout_s = 0.2", "ep_bootstrap"}},
        Connect(listeners, listeners.TopologyOf(process), &peers,
                /*timeout_s=*/0.2));
  }
}

TEST(PeersTest, ConnectingFailsSoonIfAProcessGaveUp) {
  const Listener mine;
  Topology topology;
  {
    const Listeners listeners(2);
    topology = listeners.TopologyOf(1);
  }
  std::unique_ptr<Peers> peers;
  ExpectFailure({Code::kUnavailable, {"process 0 gave up"}},
                Peers::Connect(topology, mine.socket.get(), /*timeout_s=*/30,
                               kTickS, &peers));
}

// Two processes claim the number 1.
TEST(PeersTest, OnlyOneProcessGetsANumber) {
  const Listeners listeners(2);
  Status statuses[3];
  std::unique_ptr<Peers> peers[3];
  testing::ForEachRank(3, [&](int64_t i) {
    statuses[i] = Connect(listeners, listeners.TopologyOf(i > 0), &peers[i],
                          /*timeout_s=*/0.5);
  });
  ExpectOk(statuses[0]);
  EXPECT_NE(statuses[1].ok(), statuses[2].ok());
}

// The rejected process has the same user, but is not in the group.
TEST(PeersTest, RejectsAnUnexpectedProcess) {
  const Listeners listeners(2);
  Status statuses[2];
  testing::ForEachRank(2, [&](int64_t p) {
    Topology topology = listeners.TopologyOf(p);
    if (p == 0) topology.processes[1].pid = getppid();
    std::unique_ptr<Peers> peers;
    statuses[p] = Connect(listeners, topology, &peers, /*timeout_s=*/0.5);
  });
  EXPECT_EQ(Code::kDeadlineExceeded, statuses[0].code());
  EXPECT_EQ(Code::kUnavailable, statuses[1].code());
}

}  // namespace
}  // namespace ep::host
