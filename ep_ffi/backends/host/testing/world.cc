// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/host/testing/world.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "ep_ffi/backends/host/group.h"
#include "ep_ffi/backends/host/testing/listener.h"

namespace ep::host {

using testing::Domain;

std::vector<Domain> MakeHostWorld(const testing::WorldOptions& options,
                                  int32_t max_processes) {
  static int num_worlds = 0;
  const int32_t ep_size = options.dims.ep_size;
  const int32_t num_ranks = options.num_domains * ep_size;
  HostGroup::Options common = {};
  common.name = StrCat("world_", num_worlds++);
  common.num_experts = options.dims.num_experts;
  common.timeout_s = options.timeout_s;
  const int32_t num_processes = std::min(num_ranks, max_processes);
  const Listeners listeners(num_processes);
  common.topology.processes = listeners.processes();
  common.topology.ep_size = ep_size;
  for (int32_t i = 0; i < num_ranks; ++i) {
    common.topology.members.push_back({i % num_processes, /*device=*/100 + i});
  }

  std::vector<std::shared_ptr<Group>> groups(num_processes);
  testing::ForEachRank(groups.size(), [&](int64_t process) {
    HostGroup::Options mine = common;
    mine.topology.process = process;
    mine.listener = listeners.socket(process);
    const Status created = HostGroup::Create(mine, &groups[process]);
    EXPECT_TRUE(created.ok()) << created.message();
  });

  std::vector<Domain> domains(options.num_domains);
  for (int32_t i = 0; i < num_ranks; ++i) {
    const Topology::Member& member = common.topology.members[i];
    Domain& domain = domains[i / ep_size];
    domain.groups.push_back(groups[member.process]);
    domain.devices.push_back(member.device);
  }
  return domains;
}

}  // namespace ep::host
