// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/nccl/runs.h"

#include <algorithm>

namespace ep::nccl {

Status Runs::Enter(const Call& call, int64_t* step) {
  const Site& site = *call.site;
  auto run = std::find_if(runs_.begin(), runs_.end(), [&](const Run& r) {
    return r.id == call.run_id && r.program == site.program;
  });
  const bool goes_on = !runs_.empty() && runs_.front().id == call.run_id;
  if (run == runs_.end() || (!goes_on && IsOther(*run, site))) {
    runs_.push_front({call.run_id, site.program, site.position, site.clone,
                      num_runs_[site.program]++});
    if (runs_.size() > kWindow) runs_.pop_back();
    run = runs_.begin();
  } else if (!goes_on) {
    return Status(
        Code::kFailedPrecondition,
        StrCat("a run of \"", site.program, "\" goes on after an op of \"",
               runs_.front().program,
               "\", so that ranks may enqueue them in different orders and "
               "wait for one another without end; launch the programs of one "
               "group from one thread"));
  }
  *step = run->step;
  return Status();
}

}  // namespace ep::nccl
