// SPDX-License-Identifier: Apache-2.0

// Texts about exchanges. Each function except Slow returns an error that names
// the expected state, the actual state, and a remedy.

#ifndef EP_FFI_BACKENDS_HOST_ENGINE_REPORT_H_
#define EP_FFI_BACKENDS_HOST_ENGINE_REPORT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ep_ffi/backends/host/engine/exchange.h"
#include "ep_ffi/backends/host/engine/launches.h"
#include "ep_ffi/backends/host/transport/topology.h"
#include "ep_ffi/core/status.h"

namespace ep::host {

// By member of the topology: the latest post, or none before the first op.
using LastPosts = std::vector<std::optional<PostedOp>>;

// Returns the error of an op that fails on a rank for `reason`.
Status FailedOnRank(const std::string& op_name, const std::string& rank_name,
                    const Status& reason);

// Fails if the ranks of a complete exchange have posted unequal signatures.
Status Disagreement(const Topology& topology, const Exchange& exchange);

// Returns the warning that an exchange lacks posts after timeout_s / 3.
std::string Slow(const Topology& topology, const Exchange& exchange,
                 const LastPosts& last_posts, double timeout_s);

// Returns the error of an exchange that lacks posts after timeout_s.
Status Late(const Topology& topology, const Exchange& exchange,
            const LastPosts& last_posts, double timeout_s);

// Fails if a peer has posted an op that this process has not run.
Status Missed(const Topology& topology, const LastPosts& last_posts,
              const Launches& launches);

// Returns the error of a terminating process, which may wait for failed ranks.
Status Stuck(const Topology& topology, const Status& failure,
             double exit_after_s);

// Returns the error of ops after a peer closed its group (orderly) or died.
Status Left(const Topology& topology, int32_t process, bool is_orderly,
            const std::string& group_name);

// Returns the error of ops after this process has closed the group.
Status Closed(const std::string& group_name);

// Returns the error of ops after a process has sent an invalid post.
Status InvalidPost(const Topology& topology, int32_t process);

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_ENGINE_REPORT_H_
