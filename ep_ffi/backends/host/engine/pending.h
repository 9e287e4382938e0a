// SPDX-License-Identifier: Apache-2.0

// The exchanges that still lack posts.
//
// Posts match by key, never by order of arrival. In a loop a key recurs, but a
// rank posts iteration i + 1 only after iteration i has completed. So a post
// belongs to the oldest exchange of its key that lacks the rank's post.
//
// This file does not depend on processes, messages or failures.

#ifndef EP_FFI_BACKENDS_HOST_ENGINE_PENDING_H_
#define EP_FFI_BACKENDS_HOST_ENGINE_PENDING_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ep_ffi/backends/host/transport/messages.h"
#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/status.h"

namespace ep::host {

// An op that a rank posts, and the launch of the op.
struct PostedOp {
  Op op = {};  // may be invalid in a peer's message
  Launch launch = {};
  int64_t position = 0;     // index of the op in its program
  bool is_checked = false;  // checked mode of the layer; false for peers
  std::string layer;
  std::string program;

  // Returns the name of the op, ep_dispatch(layer "moe_3"). In checked mode,
  // appends the step: the number of earlier launches of the program.
  std::string Name() const { return NameOf(/*with_step=*/is_checked); }
  // Returns name, step, program and position, for comparing ranks.
  std::string FullName() const {
    return StrCat(NameOf(/*with_step=*/true), " of \"", program, "\", op ",
                  position);
  }

 private:
  std::string NameOf(bool with_step) const {
    std::string name = OpName(op, layer);
    if (with_step) name += StrCat(", step ", launch.number);
    return name;
  }
};

// Identifies an exchange. All iterations of a loop have the same key.
struct Key {
  int32_t domain;
  uint64_t site_id;  // see Site::id
  int64_t run_id;    // of this process

  auto Tie() const { return std::tie(domain, site_id, run_id); }
  bool operator<(const Key& other) const { return Tie() < other.Tie(); }
};

// The two arrays of a rank that its peers read: rows and weights, or the two
// arrays of SortedChoices (ep_prepare). The signature contains the array sizes.
struct Arrays {
  const void* first = nullptr;
  const void* second = nullptr;  // null if the array is empty
};

// The contribution of a rank to an exchange: arrays for its peers, and the work
// of the rank after all ranks have posted.
struct Contribution {
  Signature signature;
  Arrays arrays;
  // Copies to a segment the parts of both arrays that other processes read. If
  // null, the engine copies both arrays entirely.
  std::function<void(std::byte* first, std::byte* second)> stage;
  // The work of this rank, in chunks that may run concurrently.
  int64_t num_chunks = 0;
  std::function<Status(const std::vector<Arrays>& ranks, int64_t chunk)> run;
};

// One rank's post in an exchange: the arguments and the completion callback.
struct Part {
  bool is_posted = false;
  PostedOp op;
  Contribution contribution;  // remote rank: signature and arrays only
  // Completes the call of a local rank; null if the rank is remote.
  std::function<void(Status)> done;
  // A remote segment, which this process releases: its owner and its id.
  int32_t process = -1;
  uint64_t segment = 0;
};

// One exchange between all ranks of an EP domain.
struct Exchange {
  Key key;
  double began_at;  // see Now
  int32_t num_missing;
  std::vector<Part> parts;  // by rank

  static constexpr int32_t kNoRank = -1;
  // Returns the first rank whose call waits in this process, or kNoRank.
  int32_t FirstLocalRank() const;
  // Returns the name of the op that the first local rank posted.
  std::string OpName() const;
  // Returns the post of the first rank that has posted.
  const Part& FirstPost() const;
};
using ExchangePtr = std::shared_ptr<Exchange>;

// Not thread-safe; the owner's lock guards this object. The caller of `Add` or
// `Take` owns the returned exchanges.
class Pending {
 public:
  explicit Pending(int32_t ep_size) : ep_size_(ep_size) {}

  // Returns the exchange to which a post of `rank` would belong, or null if the
  // post would begin a new exchange.
  const Exchange* Find(const Key& key, int32_t rank) const;

  // Adds a post. Returns the exchange if no other post is missing, else null.
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

  // Returns the exchanges that began by `time`. The exchanges stay pending.
  std::vector<const Exchange*> FindBegunBy(double time) const;

 private:
  // Exchanges of equal keys are sorted by their start, the earliest first.
  using Entries = std::multimap<Key, ExchangePtr>;

  // Like `Find`, but returns the map entry, or end().
  Entries::const_iterator FindEntry(const Key& key, int32_t rank) const;

  const int32_t ep_size_;
  Entries exchanges_;
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_ENGINE_PENDING_H_
