// SPDX-License-Identifier: Apache-2.0

// The C function that creates a host group. ep/_src/native/ffi.py calls it.

#include <cstdint>
#include <memory>

#include "ep_ffi/backends/host/group.h"
#include "ep_ffi/core/export.h"
#include "ep_ffi/core/registry.h"
#include "ep_ffi/core/status.h"

// ep/_src/native/ffi.py declares the same structs. `Topology` and
// `HostGroup::Options` document the fields.
extern "C" {

struct EpHostProcess {
  int32_t id;
  int32_t pid;
  int32_t socket;  // -1 for this process
};

struct EpHostRank {
  int32_t process;
  int32_t device;
};

struct EpHostGroup {
  const char* name;
  const char* config;  // see `Registry::Add`
  int64_t num_experts;
  double timeout_s;
  double exit_after_s;
  const EpHostProcess* processes;
  const EpHostRank* ranks;  // domain-major
  int32_t num_processes;
  int32_t num_ranks;
  int32_t ep_size;
  int32_t process;
};

}  // extern "C"

namespace ep::host {
namespace {

HostGroup::Options ToOptions(const EpHostGroup& group) {
  HostGroup::Options options;
  options.num_experts = group.num_experts;
  Topology& topology = options.topology;
  topology.process = group.process;
  topology.ep_size = group.ep_size;
  for (int32_t p = 0; p < group.num_processes; ++p) {
    const EpHostProcess& process = group.processes[p];
    topology.processes.push_back({process.id, process.pid});
    options.sockets.emplace_back(process.socket);
  }
  for (int32_t r = 0; r < group.num_ranks; ++r) {
    const EpHostRank& rank = group.ranks[r];
    topology.members.push_back({rank.process, rank.device});
  }
  options.exchanges = {group.name, group.timeout_s,
                       [](int64_t run_id, const Status& status) {
                         Registry::Get().FailRun(run_id, status);
                       },
                       group.exit_after_s};
  return options;
}

}  // namespace
}  // namespace ep::host

// Creates a group, which takes the processes' sockets.
EP_EXPORT int32_t ep_host_group_create(const EpHostGroup* group, char* error,
                                       int64_t error_bytes) {
  return ep::Export(error, error_bytes, [&] {
    std::shared_ptr<ep::Group> created;
    EP_RETURN_IF_ERROR(
        ep::host::HostGroup::Create(ep::host::ToOptions(*group), &created));
    return ep::Registry::Get().Add(group->name, group->config, created);
  });
}
