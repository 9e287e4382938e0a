// SPDX-License-Identifier: Apache-2.0

// The messages of an exchange. Each function returns an error that says what
// was expected, what came, and the cure; Slow returns a warning.

#ifndef EP_FFI_BACKENDS_HOST_ENGINE_REPORT_H_
#define EP_FFI_BACKENDS_HOST_ENGINE_REPORT_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ep_ffi/backends/host/engine/launches.h"
#include "ep_ffi/backends/host/engine/pending.h"
#include "ep_ffi/backends/host/engine/posted_op.h"
#include "ep_ffi/backends/host/topology.h"
#include "ep_ffi/core/status.h"

namespace ep::host {

// The latest post of a member of the topology.
struct LastPost {
  PostedOp op;
  double at;  // of Now(): when it posted, or an exchange of it was complete
};

// The latest post of each member; none if it has run no op.
using LastPosts = std::vector<std::optional<LastPost>>;

// An op failed for a reason that is not its own.
Status FailedOnRank(const std::string& op_name, const std::string& rank_name,
                    const Status& reason);

// The ranks of a complete exchange have not posted the same. Ok if they have.
Status Disagreement(const Topology& topology, const Exchange& exchange);

// A third of the time of an exchange is over: returns who waits for whom.
std::string Slow(const Topology& topology, const Exchange& exchange,
                 const LastPosts& last_posts, double timeout_s);

// The time of an exchange is up.
Status Late(const Topology& topology, const Exchange& exchange,
            const LastPosts& last_posts, double timeout_s);

// Returns what this process knows of its group, for `python -m ep stuck`: JSON
// of at most `max_bytes`, without what does not fit. Times are of Now().
// `since` is when the group began.
std::string Progress(const Topology& topology, const std::string& group_name,
                     const std::vector<const Exchange*>& pending,
                     const LastPosts& last_posts, double since,
                     size_t max_bytes);

// A peer has posted what this process has not run. Ok if there is no such peer.
Status Missed(const Topology& topology, const LastPosts& last_posts,
              const Launches& launches);

// This process ends, because it may wait for ranks that have failed.
Status Stuck(const Topology& topology, const Status& failure,
             double exit_after_s);

// A process has closed the group (`is_orderly`), or died.
Status Left(const Topology& topology, int32_t process, bool is_orderly,
            const std::string& group_name);

// This process has closed the group.
Status Closed(const std::string& group_name);

// A process has sent a post that cannot be.
Status InvalidPost(const Topology& topology, int32_t process);

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_ENGINE_REPORT_H_
