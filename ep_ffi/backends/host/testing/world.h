// SPDX-License-Identifier: Apache-2.0

// Groups of the host backend whose processes are played by threads: what makes
// a group one process's is its number alone, so sockets and shared memory are
// as real as between processes.

#ifndef EP_FFI_BACKENDS_HOST_TESTING_WORLD_H_
#define EP_FFI_BACKENDS_HOST_TESTING_WORLD_H_

#include <cstdint>
#include <vector>

#include "ep_ffi/testing/ranks.h"

namespace ep::host {

// The domains of one group. Ranks are dealt to processes in turn; there are no
// empty processes.
std::vector<testing::Domain> MakeHostWorld(const testing::WorldOptions& options,
                                           int32_t max_processes);

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_TESTING_WORLD_H_
