// SPDX-License-Identifier: Apache-2.0

// The C functions of NCCL groups, which ep/_src/native/ffi.py calls. `nccl` and
// `nccl_ep` are the paths of the libraries; see Libraries::Load.

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ep_ffi/backends/nccl/group.h"
#include "ep_ffi/backends/nccl/ranks.h"
#include "ep_ffi/core/export.h"
#include "ep_ffi/core/registry.h"
#include "ep_ffi/core/status.h"

namespace ep::nccl {
namespace {

Status Find(const char* name, std::shared_ptr<NcclRanks>* out) {
  *out = std::dynamic_pointer_cast<NcclRanks>(Registry::Get().Find(name));
  if (*out) return Status();
  return Status(Code::kFailedPrecondition, "the group was closed");
}

}  // namespace
}  // namespace ep::nccl

// Writes a new ncclUniqueId to `id`. `id_bytes` must be the size of
// ncclUniqueId.
EP_EXPORT int32_t ep_nccl_unique_id(const char* nccl, const char* nccl_ep,
                                    char* id, int64_t id_bytes, char* error,
                                    int64_t error_bytes) {
  return ep::Export(error, error_bytes, [&] {
    std::string unique_id;
    EP_RETURN_IF_ERROR(ep::nccl::NewUniqueId(nccl, nccl_ep, &unique_id));
    if (static_cast<int64_t>(unique_id.size()) != id_bytes) {
      return ep::Status(ep::Code::kInternal,
                        "an NCCL unique id has another size");
    }
    std::memcpy(id, unique_id.data(), id_bytes);
    return ep::Status();
  });
}

// Creates the group `name` on `devices`, GPUs of this process, each a rank of
// EP domain `domain`. For `config` see `Registry::Add`.
EP_EXPORT int32_t ep_nccl_group_create(
    const char* name, const char* config, const int32_t* ranks,
    const int32_t* devices, int64_t num_ranks, int32_t domain,
    int64_t num_experts, int64_t ep_size, int64_t max_tokens, int64_t capacity,
    int64_t max_row_bytes, int64_t max_num_sms, double timeout_s,
    double exit_after_s, const char* nccl, const char* nccl_ep, char* error,
    int64_t error_bytes) {
  return ep::Export(error, error_bytes, [&] {
    ep::nccl::NcclGroup::Options options;
    options.name = name;
    options.sizes = {num_experts, ep_size,       max_tokens,
                     capacity,    max_row_bytes, max_num_sms};
    options.domain = domain;
    options.timeout_s = timeout_s;
    options.exit_after_s = exit_after_s;
    options.nccl_path = nccl;
    options.nccl_ep_path = nccl_ep;
    std::vector<ep::nccl::NcclRanks::Rank> mine(num_ranks);
    for (int64_t i = 0; i < num_ranks; ++i) {
      options.rank = ranks[i];
      options.device = mine[i].device = devices[i];
      EP_RETURN_IF_ERROR(ep::nccl::NcclGroup::Create(options, &mine[i].group));
    }
    return ep::Registry::Get().Add(
        name, config, std::make_shared<ep::nccl::NcclRanks>(std::move(mine)));
  });
}

// Connects the rank of this process over a communicator from `id`, which all
// ranks of the domain share; this is collective over the domain. Without an
// `id`, ep_connect has given each rank a communicator. Then checks the machine.
// The ranks of the domain have `num_hosts` different host names.
EP_EXPORT int32_t ep_nccl_group_connect(const char* name, const char* id,
                                        int64_t id_bytes, int64_t num_hosts,
                                        char* error, int64_t error_bytes) {
  return ep::Export(error, error_bytes, [&] {
    std::shared_ptr<ep::nccl::NcclRanks> ranks;
    EP_RETURN_IF_ERROR(ep::nccl::Find(name, &ranks));
    if (id_bytes > 0) {
      EP_RETURN_IF_ERROR(ranks->ConnectById(std::string(id, id_bytes)));
    }
    return ranks->CheckMachine(num_hosts);
  });
}

// Lets ops run. Collective over the domain, so ep_nccl_group_connect must have
// succeeded on all its processes.
EP_EXPORT int32_t ep_nccl_group_open(const char* name, char* error,
                                     int64_t error_bytes) {
  return ep::Export(error, error_bytes, [&] {
    std::shared_ptr<ep::nccl::NcclRanks> ranks;
    EP_RETURN_IF_ERROR(ep::nccl::Find(name, &ranks));
    return ranks->Open();
  });
}

// Passes `others`, a sentence about the other ranks, to the watchdog of the
// i-th local rank. Writes the rank's Watchdog::Place to `numbers` and `text`.
EP_EXPORT int32_t ep_nccl_group_place(const char* name, int64_t i,
                                      const char* others, double* numbers,
                                      char* text, int64_t text_bytes,
                                      char* error, int64_t error_bytes) {
  return ep::Export(error, error_bytes, [&] {
    std::shared_ptr<ep::nccl::NcclRanks> ranks;
    EP_RETURN_IF_ERROR(ep::nccl::Find(name, &ranks));
    ep::nccl::NcclGroup* const group = ranks->At(i);
    if (!group) return ep::Status(ep::Code::kInternal, "no such rank");
    group->watchdog().Hear(others);
    const auto place = group->watchdog().FindPlace();
    numbers[0] = place.num_ended;
    numbers[1] = place.has_begun;
    numbers[2] = place.num_left;
    numbers[3] = place.still_s;
    std::strncpy(text, place.text.c_str(), text_bytes - 1);
    text[text_bytes - 1] = 0;
    return ep::Status();
  });
}
