// SPDX-License-Identifier: Apache-2.0

// The fake NCCL: communicators and ncclAllGather.

#include <nccl.h>
#include <nccl_device/core.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>

#include "ep_ffi/backends/nccl/fake/checks.h"
#include "ep_ffi/backends/nccl/fake/communicator.h"
#include "ep_ffi/backends/nccl/fake/driver.h"
#include "ep_ffi/backends/nccl/fake/fake.h"
#include "ep_ffi/core/mutex.h"

namespace ep::nccl::fake {
namespace {

// Returns the clique of an id. Forgets the id when the last rank has called.
std::shared_ptr<Clique> CliqueOf(const ncclUniqueId& id, int size) {
  struct Forming {
    std::shared_ptr<Clique> clique;
    int num_missing;
  };
  static Mutex mutex;
  static auto* forming EP_PT_GUARDED_BY(mutex) =
      new std::map<std::string, Forming>();
  MutexLock lock(mutex);
  const std::string key(id.internal, sizeof(id.internal));
  Forming& entry = (*forming)[key];
  if (!entry.clique) entry = {std::make_shared<Clique>(size), size};
  const std::shared_ptr<Clique> clique = entry.clique;
  if (--entry.num_missing == 0) forming->erase(key);
  return clique;
}

// Requires that the communicator exists and belongs to the current context.
void RequireCommunicator(Contract& contract, ncclComm_t comm) {
  if (contract.Require(LiveObjects<ncclComm>::Get().Has(comm),
                       "no such communicator")) {
    RequireContext(contract, comm->member->device());
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
  if (!MayWait(Contract("ncclCommInitRank"))) return ncclInvalidUsage;
  const int device = CurrentContext()->device;
  const auto clique = CliqueOf(id, num_ranks);
  if (!clique->Exchange(rank, StrCat("ncclCommInitRank of ", num_ranks),
                        nullptr, nullptr)) {
    return ncclSystemError;
  }
  *comm = LiveObjects<ncclComm>::Get().Add(
      new ncclComm{std::make_shared<Member>(clique, rank, device)});
  return ncclSuccess;
}

ncclResult_t ncclCommQueryProperties(ncclComm_t comm,
                                     ncclCommProperties_t* properties) {
  Contract contract("ncclCommQueryProperties");
  contract.RequireNoHandler();
  RequireCommunicator(contract, comm);
  const ncclCommProperties_t fresh = NCCL_COMM_PROPERTIES_INITIALIZER;
  contract.Require(properties->size == fresh.size &&
                       properties->magic == fresh.magic &&
                       properties->version == fresh.version,
                   "the properties were not initialized as their header says");
  if (!contract.kept()) return ncclInvalidUsage;
  const int size = comm->member->clique().size();
  const int in_team = TheMachine().nvlink_ranks;
  properties->rank = comm->member->rank();
  properties->nRanks = size;
  properties->cudaDev = comm->member->device();
  properties->nLsaTeams = in_team > 0 ? size / in_team : 1;
  properties->railedGinType =
      TheMachine().gin ? NCCL_GIN_TYPE_GDAKI : NCCL_GIN_TYPE_NONE;
  properties->deviceApiSupport =
      TheMachine().device_api &&
      (TheMachine().gin || properties->nLsaTeams == 1);
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  Contract contract("ncclCommDestroy");
  contract.RequireNoHandler();
  RequireCommunicator(contract, comm);
  if (!contract.kept()) return ncclInvalidArgument;
  contract.Require(comm->num_groups == 0, "a group of NCCL EP lives on it");
  contract.Require(!comm->member->IsBusy(), "its collectives have not ended");
  if (!contract.kept()) return ncclInvalidUsage;
  LiveObjects<ncclComm>::Get().Remove(comm);
  delete comm;
  return ncclSuccess;
}

// On a GPU, the kernels of NCCL EP continue to wait after an abort. In the fake
// they stop, so that a test can end.
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  Contract contract("ncclCommAbort");
  contract.RequireNoHandler();
  RequireCommunicator(contract, comm);
  if (!contract.kept()) return ncclInvalidArgument;
  comm->member->clique().Abort(comm->member->rank());
  LiveObjects<ncclComm>::Get().Remove(comm);
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclAllGather(const void* mine, void* all, size_t count,
                           ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  Contract contract("ncclAllGather");
  RequireCommunicator(contract, comm);
  RequireStream(contract, stream);
  contract.Require(mine && all, "no buffer");
  contract.Require(type == ncclInt32, "the fake does not know type ", type);
  if (!contract.kept()) return ncclInvalidArgument;
  return Member::Enqueue(
      comm->member, contract, stream,
      [=, member = comm->member, bytes = count * sizeof(int32_t)] {
        Clique& clique = member->clique();
        Clique::Exchanged exchanged;
        if (!clique.Exchange(member->rank(), StrCat("ncclAllGather of ", count),
                             mine, &exchanged)) {
          // NCCL leaves `all` undefined. Zeros keep the next kernel in bounds.
          std::memset(all, 0, clique.size() * bytes);
          return;
        }
        for (int rank = 0; rank < clique.size(); ++rank) {
          std::memmove(static_cast<std::byte*>(all) + rank * bytes,
                       exchanged.contributions[rank], bytes);
        }
        clique.Exchange(member->rank(), "the end of ncclAllGather", nullptr,
                        nullptr);
      });
}

}  // extern "C"

}  // namespace ep::nccl::fake
