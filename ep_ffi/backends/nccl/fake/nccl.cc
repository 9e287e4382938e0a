// SPDX-License-Identifier: Apache-2.0

// NCCL: communicators, and the one collective that the backend calls.

#include <nccl.h>
#include <nccl_device/core.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "ep_ffi/backends/nccl/fake/communicator.h"
#include "ep_ffi/backends/nccl/fake/driver.h"
#include "ep_ffi/backends/nccl/fake/fake.h"
#include "ep_ffi/backends/nccl/fake/ledger.h"

namespace ep::nccl::fake {
namespace {

// The clique that an id stands for, until all its ranks have come.
std::shared_ptr<Clique> CliqueOf(const ncclUniqueId& id, int size) {
  struct Forming {
    std::shared_ptr<Clique> clique;
    int num_missing;
  };
  static std::mutex mutex;
  static auto* forming = new std::map<std::string, Forming>();
  std::lock_guard<std::mutex> lock(mutex);
  const std::string key(id.internal, sizeof(id.internal));
  Forming& entry = (*forming)[key];
  if (!entry.clique) entry = {std::make_shared<Clique>(size), size};
  const std::shared_ptr<Clique> clique = entry.clique;
  if (--entry.num_missing == 0) forming->erase(key);
  return clique;
}

// NCCL's documentation allows so many, or more if each takes less of a device.
constexpr int kRanksOfDevice = 2;

bool MayShareDevices() {
  const char* value = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return value && std::string(value) == "1";
}

size_t SizeOf(ncclDataType_t type) {
  switch (type) {
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    default:
      return 1;
  }
}

// Whether it may be used, in the context that is current.
void DemandCommunicator(Contract& contract, ncclComm_t comm) {
  if (contract.Demand(Living<ncclComm>::Get().Has(comm),
                      "no such communicator")) {
    DemandContext(contract, comm->member->device());
  }
}

}  // namespace
extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = TheMachine().nccl_version;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclSuccess ? "no error" : "an error of the fake NCCL";
}

const char* ncclGetLastError(ncclComm_t) { return ""; }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static std::atomic<uint64_t> last{0};
  const uint64_t number = ++last;
  std::memset(id, 0x5a, sizeof(*id));
  std::memcpy(id, &number, sizeof(number));
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int num_ranks, ncclUniqueId id,
                              int rank) {
  Contract contract("ncclCommInitRank");
  contract.DemandNoHandler();
  contract.Demand(CurrentContext(), "no context is current");
  if (!contract.kept()) return ncclInvalidUsage;
  if (num_ranks < 1 || rank < 0 || rank >= num_ranks) {
    return ncclInvalidArgument;
  }
  const int device = CurrentContext()->device;
  const auto clique = CliqueOf(id, num_ranks);
  Clique::Met met;
  if (!clique->Meet(rank, StrCat("ncclCommInitRank of ", num_ranks), &device,
                    &met)) {
    return ncclSystemError;
  }
  std::map<int, int> ranks_of_device;
  int most = 0;
  for (int i = 0; i < num_ranks; ++i) {
    most = std::max(most, ++ranks_of_device[met.From<int>(i)]);
  }
  clique->Meet(rank, "ncclCommInitRank, end", nullptr, nullptr);
  if (most > 1 && !MayShareDevices()) {
    return ncclInvalidUsage;  // "Duplicate GPU detected"
  }
  if (!contract.Demand(most <= kRanksOfDevice || std::getenv("NCCL_MAX_CTAS"),
                       "hangs later on, for ", most,
                       " ranks share a device and "
                       "NCCL_MAX_CTAS does not limit their blocks")) {
    return ncclInvalidUsage;
  }
  *comm = Living<ncclComm>::Get().Add(
      new ncclComm{std::make_shared<Member>(clique, rank, device)});
  return ncclSuccess;
}

ncclResult_t ncclCommQueryProperties(ncclComm_t comm,
                                     ncclCommProperties_t* properties) {
  Contract contract("ncclCommQueryProperties");
  contract.DemandNoHandler();
  DemandCommunicator(contract, comm);
  const ncclCommProperties_t fresh = NCCL_COMM_PROPERTIES_INITIALIZER;
  contract.Demand(properties->size == fresh.size &&
                      properties->magic == fresh.magic &&
                      properties->version == fresh.version,
                  "the properties were not initialized as their header says");
  if (!contract.kept()) return ncclInvalidUsage;
  const int size = comm->member->clique().size();
  const int in_team = TheMachine().nvlink_ranks;
  properties->rank = comm->member->rank();
  properties->nRanks = size;
  properties->cudaDev = comm->member->device();
  properties->deviceApiSupport = TheMachine().device_api;
  properties->nLsaTeams = in_team > 0 ? size / in_team : 1;
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  Contract contract("ncclCommDestroy");
  contract.DemandNoHandler();
  DemandCommunicator(contract, comm);
  if (!contract.kept()) return ncclInvalidArgument;
  contract.Demand(comm->num_groups == 0, "a group of NCCL EP lives on it");
  contract.Demand(!comm->member->IsBusy(), "its collectives have not ended");
  if (!contract.kept()) return ncclInvalidUsage;
  Living<ncclComm>::Get().Remove(comm);
  delete comm;
  return ncclSuccess;
}

// On a GPU, what NCCL EP has enqueued goes on to wait. Here it ends as well: a
// test must come to its end.
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  Contract contract("ncclCommAbort");
  contract.DemandNoHandler();
  DemandCommunicator(contract, comm);
  if (!contract.kept()) return ncclInvalidArgument;
  comm->member->clique().Abort(comm->member->rank());
  Living<ncclComm>::Get().Remove(comm);
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclAllGather(const void* mine, void* all, size_t count,
                           ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  Contract contract("ncclAllGather");
  DemandCommunicator(contract, comm);
  DemandStream(contract, stream);
  contract.Demand(mine && all, "no buffer");
  if (!contract.kept()) return ncclInvalidArgument;
  return Member::Enqueue(
      comm->member, contract, stream,
      [=, member = comm->member, bytes = count * SizeOf(type)] {
        Clique& clique = member->clique();
        Clique::Met met;
        if (!clique.Meet(member->rank(),
                         StrCat("ncclAllGather of ", count, " of type ", type),
                         mine, &met)) {
          // Undefined in truth; but what reads it next must not overflow.
          std::memset(all, 0, clique.size() * bytes);
          return;
        }
        for (int rank = 0; rank < clique.size(); ++rank) {
          std::memmove(static_cast<std::byte*>(all) + rank * bytes,
                       met.brought[rank], bytes);
        }
        clique.Meet(member->rank(), "the end of ncclAllGather", nullptr,
                    nullptr);
      });
}

}  // extern "C"

}  // namespace ep::nccl::fake
