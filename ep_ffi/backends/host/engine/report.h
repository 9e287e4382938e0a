// SPDX-License-Identifier: Apache-2.0

// The messages about exchanges. Each function except Slow and Progress returns
// an error that names the expected and the actual state, and a remedy.

#ifndef EP_FFI_BACKENDS_HOST_ENGINE_REPORT_H_
#define EP_FFI_BACKENDS_HOST_ENGINE_REPORT_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ep_ffi/backends/host/engine/launches.h"
#include "ep_ffi/backends/host/engine/pending.h"
#include "ep_ffi/backends/host/topology.h"
#include "ep_ffi/core/status.h"

namespace ep::host {

// The latest post of a member of the topology.
struct LastPost {
  PostedOp op;
  double at;  // see Now: the time of the post, or of the complete exchange
};

// The latest post of each member; none if it has run no op.
using LastPosts = std::vector<std::optional<LastPost>>;

// An op failed for the reason of another op or process.
Status FailedOnRank(const std::string& op_name, const std::string& rank_name,
                    const Status& reason);

// The ranks of a complete exchange have posted different signatures. Ok if the
// signatures are equal.
Status Disagreement(const Topology& topology, const Exchange& exchange);

// Returns a warning: an exchange lacks posts after a third of timeout_s.
std::string Slow(const Topology& topology, const Exchange& exchange,
                 const LastPosts& last_posts, double timeout_s);

// An exchange lacks posts after timeout_s.
Status Late(const Topology& topology, const Exchange& exchange,
            const LastPosts& last_posts, double timeout_s);

// Returns the state of the group as JSON, for `python -m ep stuck`. Leaves out
// entries to stay within `max_bytes`. Times are from Now. The group exists
// since `since`.
std::string Progress(const Topology& topology, const std::string& group_name,
                     const std::vector<const Exchange*>& pending,
                     const LastPosts& last_posts, double since,
                     size_t max_bytes);

// A peer has posted an op that this process has not run. Ok if there is none.
Status Missed(const Topology& topology, const LastPosts& last_posts,
              const Launches& launches);

// This process terminates, because it may wait for ranks that have failed.
Status Stuck(const Topology& topology, const Status& failure,
             double exit_after_s);

// A process has closed the group (`is_orderly`), or died.
Status Left(const Topology& topology, int32_t process, bool is_orderly,
            const std::string& group_name);

// This process has closed the group.
Status Closed(const std::string& group_name);

// A process has sent an invalid post.
Status InvalidPost(const Topology& topology, int32_t process);

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_ENGINE_REPORT_H_
