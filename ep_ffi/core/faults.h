// SPDX-License-Identifier: Apache-2.0

// Errors with the same text for every backend, mostly of ep_prepare.

#ifndef EP_FFI_CORE_FAULTS_H_
#define EP_FFI_CORE_FAULTS_H_

#include <cstdint>
#include <exception>

#include "ep_ffi/core/status.h"

namespace ep {

inline Status IdOutOfRange(int64_t token, int64_t k, int64_t id,
                           int64_t num_experts) {
  return Status(Code::kInvalidArgument,
                StrCat("topk_idx[", token, ", ", k, "] = ", id,
                       ", but num_experts = ", num_experts,
                       "; valid ids are -1..", num_experts - 1));
}

inline Status RepeatedId(int64_t token, int64_t k, int64_t id) {
  return Status(Code::kInvalidArgument,
                StrCat("topk_idx[", token, ", ", k, "] = ", id,
                       " repeats an expert of token ", token,
                       "; the top-k experts of a token must be distinct (use "
                       "-1 for an unused choice)"));
}

// Returns the error for a rank whose position (domain * P + rank) is `program`
// in the program's mesh, but `group` in the group's mesh.
inline Status OtherPlace(int64_t program, int64_t group, int64_t ep_size) {
  return Status(
      Code::kFailedPrecondition,
      StrCat("the mesh of the program has this device as rank ",
             program % ep_size, " of EP domain ", program / ep_size,
             ", but in the mesh of the group it is rank ", group % ep_size,
             " of EP domain ", group / ep_size,
             "; run the program on the mesh that was given to ep_bootstrap, "
             "with each device where it was"));
}

inline Status Overflow(int64_t rank, int64_t needed, int64_t capacity) {
  return Status(Code::kResourceExhausted,
                StrCat("rank ", rank, " needs ", needed,
                       " receive rows, but the capacity is ", capacity,
                       "; raise capacity_factor or recv_capacity_per_rank, "
                       "balance the routing, or use overflow=\"drop\""));
}

inline Status NoMemory(const std::exception& e) {
  return Status(Code::kResourceExhausted,
                StrCat("an array cannot be allocated: ", e.what(),
                       "; leave more memory to this process"));
}

}  // namespace ep

#endif  // EP_FFI_CORE_FAULTS_H_
