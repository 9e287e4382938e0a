// SPDX-License-Identifier: Apache-2.0

#ifndef EP_FFI_BACKENDS_NCCL_REPORTS_H_
#define EP_FFI_BACKENDS_NCCL_REPORTS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "ep_ffi/backends/nccl/device.h"
#include "ep_ffi/backends/nccl/kernels.h"
#include "ep_ffi/backends/nccl/limits.h"
#include "ep_ffi/backends/nccl/watchdog.h"
#include "ep_ffi/core/backend.h"
#include "ep_ffi/core/status.h"

namespace ep::nccl {

// Returns the position of a rank in the mesh of its group; see
// PrepareArgs::place.
inline int64_t PlaceIndex(const Sizes& sizes, int32_t domain, int32_t rank) {
  return domain * sizes.ep_size + rank;
}

// The outcomes of ops. The device writes an outcome to a report, and the host
// reads the report later. Each prepare has its own report until the host reads
// it. All other ops share one report, which keeps the first unread fault.
//
// Not thread-safe.
class Reports {
 public:
  // The maximum number of prepares whose outcome the host has not read. With
  // fewer, the host would wait for the device within a step of a deep model.
  // The reports of the window have 8 KiB.
  static constexpr size_t kWindow = 256;
  static constexpr int32_t kNumReports = kWindow + 1;

  // `device` has kNumReports reports. `domain` is the EP domain of this rank.
  Reports(std::shared_ptr<const Device> device, const Sizes& sizes,
          int32_t domain)
      : device_(std::move(device)), sizes_(sizes), domain_(domain) {}

  bool empty() const { return prepares_.empty(); }
  bool full() const { return prepares_.size() == kWindow; }

  // Sets `routing->report` and `routing->ticket` for a new prepare.
  void Begin(Routing* routing);
  // Adds the prepare called `op`, which was enqueued after Begin.
  void Add(const std::string& op, const Layer& layer, CUstream stream);
  // Waits for the oldest prepare, removes it, and sets `out` to its error.
  // Returns false if an op is stuck, or the device has failed. Waits without a
  // limit until the stream reaches an op, because XLA's programs may run for
  // any time.
  bool TakeOldest(Watchdog& watchdog, Status* out);

  // Returns the report that all ops except prepares share.
  Report* shared() const { return device_->report(kShared); }
  // Returns the number that identifies `op` in the shared report.
  int32_t NumberOf(const std::string& op);
  // Returns the fault in the shared report, and clears it.
  Status TakeShared();

 private:
  static constexpr int32_t kShared = kWindow;

  struct Prepare {
    uint64_t ticket;
    std::string op;
    int64_t top_k;
    int64_t capacity;
    CUstream stream;
  };

  Status ToStatus(const Outcome& outcome, const Prepare& prepare) const;

  const std::shared_ptr<const Device> device_;
  const Sizes sizes_;
  const int32_t domain_;

  uint64_t last_ticket_ = 0;
  std::deque<Prepare> prepares_;           // oldest first
  std::vector<std::string> numbered_ops_;  // by number
};

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_REPORTS_H_
