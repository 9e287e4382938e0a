// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/testing/groups.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <thread>

#include "ep_ffi/backends/host/group.h"
#include "ep_ffi/backends/host/transport/messages.h"
#include "ep_ffi/testing/expect.h"

namespace ep::host {
namespace {

using testing::Domain;
using testing::WorldOptions;

// Returns the options that all processes of a group share, without addresses.
// `process_of` returns the process of a rank.
HostGroup::Options CommonOptions(
    const WorldOptions& options,
    const std::function<int32_t(int32_t rank)>& process_of) {
  HostGroup::Options common = {};
  common.name = "group";
  common.num_experts = options.dims.num_experts;
  common.timeout_s = options.timeout_s;
  common.topology.ep_size = options.dims.ep_size;
  for (int32_t i = 0; i < options.num_domains * options.dims.ep_size; ++i) {
    common.topology.members.push_back({process_of(i), /*device=*/100 + i});
  }
  return common;
}

// Returns the EP domains of a group. `groups` is indexed by process.
std::vector<Domain> DomainsOf(
    const Topology& topology,
    const std::vector<std::shared_ptr<Group>>& groups) {
  std::vector<Domain> domains(topology.num_domains());
  for (size_t i = 0; i < topology.members.size(); ++i) {
    Domain& domain = domains[i / topology.ep_size];
    domain.groups.push_back(groups[topology.members[i].process]);
    domain.devices.push_back(topology.members[i].device);
  }
  return domains;
}

}  // namespace

std::vector<Domain> MakeHostGroup(const WorldOptions& options,
                                  int32_t max_processes) {
  const int32_t num_processes = std::min<int32_t>(
      options.num_domains * options.dims.ep_size, max_processes);
  HostGroup::Options common = CommonOptions(
      options, [&](int32_t rank) { return rank % num_processes; });
  const Listeners listeners(num_processes);
  common.topology.processes = listeners.processes();
  std::vector<std::shared_ptr<Group>> groups(num_processes);
  testing::ForEachRank(num_processes, [&](int64_t process) {
    HostGroup::Options mine = common;
    mine.topology.process = process;
    mine.listener = listeners.socket(process);
    testing::ExpectOk(HostGroup::Create(mine, &groups[process]));
  });
  return DomainsOf(common.topology, groups);
}

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
  (void)SendMessage(socket_, bytes, fds, /*flags=*/0);  // the peer may be gone
}

std::string Impostor::Receive() {
  std::string bytes(kMaxMessage, 0);
  pollfd p = {socket_.get(), POLLIN, 0};
  if (poll(&p, 1, /*ms=*/1000) <= 0) return "";
  const ssize_t size = recv(socket_.get(), &bytes[0], bytes.size(), 0);
  bytes.resize(size < 0 ? 0 : size);
  return bytes;
}

GroupWithImpostor::GroupWithImpostor(const WorldOptions& options) {
  HostGroup::Options mine =
      CommonOptions(options, [](int32_t rank) { return rank > 0; });
  std::vector<std::shared_ptr<Group>> groups(2);
  impostor = std::make_unique<Impostor>([&](const Listeners& listeners) {
    mine.listener = listeners.socket(0);
    mine.topology.processes = listeners.processes();
    testing::ExpectOk(HostGroup::Create(mine, &groups[0]));
  });
  domains = DomainsOf(mine.topology, groups);
}

GroupWithImpostor::~GroupWithImpostor() { (void)domains[0].groups[0]->Close(); }

}  // namespace ep::host
