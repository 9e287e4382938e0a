// SPDX-License-Identifier: Apache-2.0

// Checks the network between the NVLink domains of an EP domain.
//
// NCCL EP copies rows by NVLink inside an NVLink domain, and by GIN between
// NVLink domains. GIN is the interface with which a GPU sends data over NCCL's
// network by itself. Without GIN, ncclEpCreateGroup fails on ranks that have
// entered the collective, after it has printed a line to stderr.

#ifndef EP_FFI_BACKENDS_NCCL_FABRIC_H_
#define EP_FFI_BACKENDS_NCCL_FABRIC_H_

#include <cstdint>
#include <string>

#include "ep_ffi/core/status.h"

namespace ep::nccl {

// How the ranks of an EP domain reach one another.
struct Fabric {
  int64_t num_ranks;
  int64_t num_nvlinks;  // NVLink domains, which NCCL calls LSA teams
  int64_t num_hosts;    // different host names
  bool has_gin;         // whether NCCL supports GIN along rails, on all ranks
  bool gpu_has_rdma;    // whether network cards may access this GPU's memory
};

// Returns an error if NCCL EP cannot connect the NVLink domains. The error
// names the environment variable, driver or device that is missing here.
// `root` is the root of the file system.
Status CheckFabric(const Fabric& fabric, const std::string& root = "/");

}  // namespace ep::nccl

#endif  // EP_FFI_BACKENDS_NCCL_FABRIC_H_
