// SPDX-License-Identifier: Apache-2.0

// The C function that creates a host group, called from ep/_src/ffi.py.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "ep_ffi/backends/host/group.h"
#include "ep_ffi/core/export.h"
#include "ep_ffi/core/registry.h"
#include "ep_ffi/core/status.h"

// Creates the group `name` of `num_ranks` ranks; for `config` see
// `Registry::Add`. The ranks are listed domain-major: rank i lives in
// process `processes[i]` on device `devices[i]`. Collective over
// processes 0..num_processes-1: `addresses` are where they listen, this one
// with the socket `listener`, which stays the caller's; `process_ids` are what
// users know them by, and `pids` their ids in the system, 0 of one that this
// process does not see.
EP_EXPORT int32_t ep_host_group_create(
    const char* name, const char* config, int32_t listener,
    const char* const* addresses, int64_t num_experts, int32_t ep_size,
    int32_t num_ranks, const int32_t* processes, const int32_t* devices,
    int32_t process, int32_t num_processes, const int32_t* process_ids,
    const int32_t* pids, double timeout_s, char* error, int64_t error_bytes) {
  return ep::Export(error, error_bytes, [&] {
    ep::host::HostGroup::Options options;
    options.name = name;
    options.num_experts = num_experts;
    options.listener = listener;
    options.addresses.assign(addresses, addresses + num_processes);
    options.pids.assign(pids, pids + num_processes);
    options.timeout_s = timeout_s;
    options.on_run_failed = [](int64_t run_id, const ep::Status& status) {
      ep::Registry::Get().FailRun(run_id, status);
    };
    options.topology.process = process;
    options.topology.process_ids.assign(process_ids,
                                        process_ids + num_processes);
    options.topology.num_processes = num_processes;
    options.topology.ep_size = ep_size;
    for (int32_t i = 0; i < num_ranks; ++i) {
      options.topology.members.push_back({processes[i], devices[i]});
    }
    std::shared_ptr<ep::Group> group;
    EP_RETURN_IF_ERROR(ep::host::HostGroup::Create(std::move(options), &group));
    return ep::Registry::Get().Add(name, config, group);
  });
}
