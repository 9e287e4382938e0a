// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/testing/listener.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <random>

#include "ep_ffi/backends/host/transport/wire.h"

namespace ep::host {
namespace {

std::string NewName() {
  std::random_device random;
  return StrCat("ep_ffi-test-", random(), "-", random());
}

}  // namespace

Listener::Listener()
    : name(NewName()), socket(::socket(AF_UNIX, SOCK_SEQPACKET, 0)) {
  sockaddr_un address;
  const socklen_t size = AddressOf(name, &address);
  EXPECT_EQ(0, bind(socket.get(), reinterpret_cast<sockaddr*>(&address), size));
  EXPECT_EQ(0, listen(socket.get(), SOMAXCONN));
}

std::vector<Topology::Process> Listeners::processes() const {
  std::vector<Topology::Process> processes;
  for (const Listener& listener : listeners_) {
    const auto id = static_cast<int32_t>(processes.size());
    processes.push_back({listener.name, id, /*pid=*/0});
  }
  return processes;
}

Topology Listeners::TopologyOf(int32_t process) const {
  return {process, /*ep_size=*/1, processes(), /*members=*/{}};
}

}  // namespace ep::host
