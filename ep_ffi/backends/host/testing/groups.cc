// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/testing/groups.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <functional>

#include "ep_ffi/backends/host/group.h"
#include "ep_ffi/backends/host/transport/messages.h"
#include "ep_ffi/testing/expect.h"

namespace ep::host {
namespace {

using testing::Domain;
using testing::WorldOptions;

Topology MakeTopology(const WorldOptions& options, int32_t num_processes,
                      const std::function<int32_t(int32_t rank)>& process_of) {
  Topology topology = TopologyOf(/*process=*/0, num_processes);
  topology.ep_size = options.dims.ep_size;
  topology.members.clear();
  for (int32_t i = 0; i < options.num_domains * options.dims.ep_size; ++i) {
    topology.members.push_back({process_of(i), /*device=*/100 + i});
  }
  return topology;
}

// Creates the group of the process `topology.process`.
std::shared_ptr<Group> Create(const WorldOptions& options, Topology topology,
                              std::vector<Fd> sockets) {
  HostGroup::Options mine = {};
  mine.num_experts = options.dims.num_experts;
  mine.exchanges = {"group", options.timeout_s, nullptr};
  mine.topology = std::move(topology);
  mine.sockets = std::move(sockets);
  std::shared_ptr<Group> group;
  testing::ExpectOk(HostGroup::Create(std::move(mine), &group));
  return group;
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
  Topology topology = MakeTopology(options, num_processes, [&](int32_t rank) {
    return rank % num_processes;
  });
  Sockets sockets(num_processes);
  std::vector<std::shared_ptr<Group>> groups;
  for (int32_t p = 0; p < num_processes; ++p) {
    topology.process = p;
    groups.push_back(Create(options, topology, sockets.Take(p)));
  }
  return DomainsOf(topology, groups);
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
  const Topology topology =
      MakeTopology(options, 2, [](int32_t rank) { return rank > 0; });
  Sockets sockets(2);
  impostor = std::make_unique<Impostor>(std::move(sockets.Take(1)[0]));
  domains = DomainsOf(topology,
                      {Create(options, topology, sockets.Take(0)), nullptr});
}

GroupWithImpostor::~GroupWithImpostor() { (void)domains[0].groups[0]->Close(); }

}  // namespace ep::host
