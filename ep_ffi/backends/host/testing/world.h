// SPDX-License-Identifier: Apache-2.0

// Groups of the host backend with threads in place of processes. A group knows
// its process by a number alone, so that sockets and shared memory are as real
// as between processes.

#ifndef EP_FFI_BACKENDS_HOST_TESTING_WORLD_H_
#define EP_FFI_BACKENDS_HOST_TESTING_WORLD_H_

#include <cstdint>
#include <vector>

#include "ep_ffi/testing/ranks.h"

namespace ep::host {

// Returns the domains of one group. Ranks are given to processes in turn; each
// process has one at least.
std::vector<testing::Domain> MakeHostWorld(const testing::WorldOptions& options,
                                           int32_t max_processes);

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_TESTING_WORLD_H_
