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

#include "ep_ffi/backends/host/testing/sockets.h"
#include "ep_ffi/testing/expect.h"
#include "ep_ffi/testing/ranks.h"

namespace ep::host {
namespace {

using testing::ExpectOk;

std::unique_ptr<Peers> Create(Topology topology, std::vector<Fd> sockets) {
  std::unique_ptr<Peers> peers;
  ExpectOk(Peers::Create(std::move(topology), std::move(sockets),
                         /*tick_s=*/0.01, &peers));
  return peers;
}

std::vector<std::unique_ptr<Peers>> CreateAll(int32_t num_processes) {
  Sockets sockets(num_processes);
  std::vector<std::unique_ptr<Peers>> all;
  for (int32_t p = 0; p < num_processes; ++p) {
    all.push_back(Create(TopologyOf(p, num_processes), sockets.Take(p)));
  }
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
  auto peers = CreateAll(3);
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
  auto peers = CreateAll(3);
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
  auto peers = CreateAll(2);
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
  auto peers = CreateAll(2);
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
  auto peers = CreateAll(2);
  Post(peers[0].get(), 1, 1, "unread");
  Post(peers[1].get(), 0, 2, "last words");
  peers[1]->SendBye("");
  peers[1].reset();
  peers[0]->Start(log.Callbacks());
  log.Expect({"post 2 of op from 1: last words", "1 closed"});
}

// A peer that closes its group, but does not read our messages.
TEST(PeersTest, KeepsNoMessagesForAPeerThatHasLeft) {
  Log log;
  auto peers = CreateAll(2);
  for (int i = 0; i < 5000; ++i) {  // more than fit into a socket
    peers[0]->SendFail({0, i, 0},
                       Status(Code::kInternal, std::string(500, 'x')));
  }
  peers[1]->SendBye("");
  peers[0]->Start(log.Callbacks());
  log.Expect({"1 closed"});
  const int next = dup(STDERR_FILENO);
  close(next);
  Segment* segment;
  ExpectOk(peers[0]->Acquire(10, {1}, &segment));
  EXPECT_EQ(next, dup(STDERR_FILENO));  // no message holds the descriptor
  close(next);
}

TEST(PeersTest, ReportsADeathThoughAChildHoldsTheSocketOpen) {
  for (bool is_reaped : {false, true}) {  // before the peers are created
    Sockets sockets(2);
    int until[2];  // the grandchild ends with this test
    ASSERT_EQ(0, pipe(until));
    const pid_t child = fork();
    if (child == 0) {
      if (fork() != 0) raise(SIGKILL);
      close(until[1]);
      char nothing;
      (void)!read(until[0], &nothing, 1);
      _exit(0);
    }
    if (is_reaped) waitpid(child, nullptr, 0);
    Log log;
    Topology topology = TopologyOf(0, 2);
    topology.processes[1].pid = child;
    const auto peers = Create(topology, sockets.Take(0));
    peers->Start(log.Callbacks());
    log.Expect({"1 died"});
    close(until[1]);
    close(until[0]);
    waitpid(child, nullptr, 0);
  }
}

}  // namespace
}  // namespace ep::host
