// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/testing/impostor.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstring>
#include <thread>

#include "ep_ffi/backends/host/group.h"
#include "ep_ffi/backends/host/transport/wire.h"

namespace ep::host {

using testing::Domain;

Impostor::Impostor(
    const std::function<void(const Listeners& listeners)>& connect)
    : socket_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
  const Listeners listeners(2);
  std::thread process([&] { connect(listeners); });
  sockaddr_un address;
  const socklen_t size = AddressOf(listeners.processes()[0].address, &address);
  EXPECT_EQ(
      0, ::connect(socket_.get(), reinterpret_cast<sockaddr*>(&address), size));
  Hello hello = {/*process=*/1};
  EXPECT_EQ(ssize_t{sizeof(hello)},
            send(socket_.get(), &hello, sizeof(hello), 0));
  EXPECT_EQ(ssize_t{sizeof(hello)},
            recv(socket_.get(), &hello, sizeof(hello), 0));
  process.join();
}

void Impostor::Send(const std::string& bytes, const std::vector<int>& fds) {
  iovec iov = {const_cast<char*>(bytes.data()), bytes.size()};
  msghdr header = {};
  header.msg_iov = &iov;
  header.msg_iovlen = 1;
  std::vector<char> control(CMSG_SPACE(fds.size() * sizeof(int)));
  if (!fds.empty()) {
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    cmsghdr* c = CMSG_FIRSTHDR(&header);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(c), fds.data(), fds.size() * sizeof(int));
  }
  (void)sendmsg(socket_.get(), &header, MSG_NOSIGNAL);  // it may have hung up
}

std::string Impostor::Receive() {
  std::string bytes(kMaxMessage, 0);
  pollfd p = {socket_.get(), POLLIN, 0};
  if (poll(&p, 1, /*ms=*/1000) <= 0) return "";
  const ssize_t size = recv(socket_.get(), &bytes[0], bytes.size(), 0);
  bytes.resize(size < 0 ? 0 : size);
  return bytes;
}

GroupWithImpostor::GroupWithImpostor(const testing::WorldOptions& options)
    : domains(options.num_domains) {
  HostGroup::Options mine = {};
  mine.name = "group";
  mine.num_experts = options.dims.num_experts;
  mine.timeout_s = options.timeout_s;
  mine.topology.ep_size = options.dims.ep_size;
  const int32_t ep_size = options.dims.ep_size;
  for (int32_t i = 0; i < options.num_domains * ep_size; ++i) {
    mine.topology.members.push_back({/*process=*/i > 0, /*device=*/i});
  }
  std::shared_ptr<Group> group;
  impostor = std::make_unique<Impostor>([&](const Listeners& listeners) {
    mine.listener = listeners.socket(0);
    mine.topology.processes = listeners.processes();
    const Status created = HostGroup::Create(mine, &group);
    EXPECT_TRUE(created.ok()) << created.message();
  });
  for (int32_t i = 0; i < options.num_domains * ep_size; ++i) {
    domains[i / ep_size].groups.push_back(i > 0 ? nullptr : group);
    domains[i / ep_size].devices.push_back(i);
  }
}

GroupWithImpostor::~GroupWithImpostor() { (void)domains[0].groups[0]->Close(); }

}  // namespace ep::host
