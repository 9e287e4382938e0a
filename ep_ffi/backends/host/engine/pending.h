// SPDX-License-Identifier: Apache-2.0

// The exchanges that still lack posts, and to which exchange a post belongs.
//
// Posts meet by key, never by arrival. Within a loop the same key recurs, but a
// rank posts iteration i + 1 only after i completed, so the oldest exchange
// that lacks the rank's post is the right one.
//
// Nothing here knows of processes, messages or failures.

#ifndef EP_FFI_BACKENDS_HOST_ENGINE_PENDING_H_
#define EP_FFI_BACKENDS_HOST_ENGINE_PENDING_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ep_ffi/backends/host/engine/contribution.h"
#include "ep_ffi/backends/host/engine/posted_op.h"
#include "ep_ffi/core/status.h"

namespace ep::host {

// Names an exchange, but for the iterations of a loop.
struct Key {
  int32_t domain;
  uint64_t site_id;  // see Site::id
  int64_t run_id;    // as this process knows it

  auto Tie() const { return std::tie(domain, site_id, run_id); }
  bool operator<(const Key& other) const { return Tie() < other.Tie(); }
};

// The post of a rank.
struct Part {
  bool is_posted = false;
  double came_at = 0;  // see Trace::Time
  PostedOp op;
  Contribution contribution;  // signature and arrays only, if it is remote
  // Completes the call of a local rank; null if the rank is remote.
  std::function<void(Status)> done;
  // The segment of a remote rank, which is to be released.
  int32_t process = -1;
  uint64_t segment = 0;
};

// One meeting of all ranks of a domain.
struct Exchange {
  Key key;
  double began_at;  // of Now()
  int32_t num_missing;
  std::vector<Part> parts;  // by rank
  double complete_at = 0;   // see Trace::Time

  static constexpr int32_t kNoRank = -1;
  // Returns the first rank whose call waits in this process, or kNoRank.
  int32_t FirstLocalRank() const;
  // Returns the name of the op, as the first local rank knows it.
  std::string OpName() const;
  // Returns the post of the first rank that has posted.
  const Part& FirstPost() const;
  // Returns the ranks that have not posted; if there is none, those that have
  // not posted what most ranks have.
  std::vector<int32_t> Outliers() const;
};
using ExchangePtr = std::shared_ptr<Exchange>;

// Not thread-safe: the owner's lock guards it. An exchange that was returned as
// complete, or taken, belongs to the caller alone.
class Pending {
 public:
  // Exchanges have `ep_size` ranks.
  explicit Pending(int32_t ep_size) : ep_size_(ep_size) {}

  // Returns the exchange that a post of `rank` would be added to, or null if it
  // would begin a new one.
  const Exchange* Find(const Key& key, int32_t rank) const;

  // Adds a post. Returns its exchange if that is complete now, else null.
  ExchangePtr Add(const Key& key, int32_t rank, Part part);

  // Removes and returns the exchanges for which `match` holds.
  template <typename Match>
  std::vector<ExchangePtr> Take(Match match) {
    std::vector<ExchangePtr> taken;
    for (auto entry = exchanges_.begin(); entry != exchanges_.end();) {
      if (!match(std::as_const(*entry->second))) {
        ++entry;
        continue;
      }
      taken.push_back(std::move(entry->second));
      entry = exchanges_.erase(entry);
    }
    return taken;
  }

  // Returns the exchanges whose first post came at `time` or before. They stay
  // pending.
  std::vector<const Exchange*> FindBegunBy(double time) const;

 private:
  // Equal keys are in the order in which their exchanges began.
  using Entries = std::multimap<Key, ExchangePtr>;

  // Returns the entry that `Find` finds, or else end().
  Entries::const_iterator FindEntry(const Key& key, int32_t rank) const;

  const int32_t ep_size_;
  Entries exchanges_;
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_ENGINE_PENDING_H_
