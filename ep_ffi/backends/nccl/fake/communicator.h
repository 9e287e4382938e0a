// SPDX-License-Identifier: Apache-2.0

#ifndef EP_FFI_BACKENDS_NCCL_FAKE_COMMUNICATOR_H_
#define EP_FFI_BACKENDS_NCCL_FAKE_COMMUNICATOR_H_

#include <cuda.h>
#include <nccl.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ep_ffi/backends/nccl/fake/checks.h"
#include "ep_ffi/core/mutex.h"

namespace ep::nccl::fake {

// A clique: the ranks of a communicator. The n-th exchange of a rank is matched
// with the n-th exchange of every other rank.
//
// Thread-safe; each rank calls from a separate thread. The lock guarantees that
// an exchange is pending exactly until its last rank joins.
class Clique {
 public:
  explicit Clique(int size)
      : size_(size), next_(size, 0), aborted_(size, false) {}

  int size() const { return size_; }

  struct Exchanged {
    uint64_t number = 0;  // unique among the exchanges of all cliques
    std::vector<const void*> contributions;  // one per rank
  };

  // Waits until all ranks have joined their next exchange. Contributions stay
  // valid until the following exchange. Returns false if this rank was aborted,
  // or after a violation: ranks with different purposes, or an absent rank.
  bool Exchange(int rank, const std::string& purpose, const void* mine,
                Exchanged* exchanged);

  // Makes this rank stop waiting. As with NCCL, the other ranks still wait.
  void Abort(int rank);

 private:
  // The state of a pending exchange, guarded by the lock of the clique.
  struct Rendezvous {
    uint64_t number = 0;
    std::map<int, std::string> purposes;  // by rank that has joined
    std::vector<const void*> contributions;
    bool done = false;
    bool failed = false;
  };

  const int size_;

  Mutex mutex_;
  CondVar changed_;
  std::vector<uint64_t> next_ EP_GUARDED_BY(mutex_);  // next exchange, by rank
  std::vector<bool> aborted_ EP_GUARDED_BY(mutex_);   // by rank
  // The exchanges that only some ranks have joined, by number.
  std::map<uint64_t, std::shared_ptr<Rendezvous>> pending_
      EP_GUARDED_BY(mutex_);
};

// A rank of a clique. The enqueued tasks of the rank share this object.
//
// Thread-safe. The lock guarantees that all unfinished tasks are on one stream.
class Member {
 public:
  Member(std::shared_ptr<Clique> clique, int rank, int device)
      : clique_(std::move(clique)), rank_(rank), device_(device) {}

  Clique& clique() const { return *clique_; }
  int rank() const { return rank_; }
  int device() const { return device_; }

  // Enqueues `task`, in which this rank exchanges data with the other ranks.
  // Concurrent tasks on two streams are a violation, because ranks might run
  // them in different orders.
  static ncclResult_t Enqueue(std::shared_ptr<Member> member,
                              Contract& contract, CUstream stream,
                              std::function<void()> task);
  bool IsBusy();

 private:
  const std::shared_ptr<Clique> clique_;
  const int rank_;
  const int device_;

  Mutex mutex_;
  CUstream stream_ EP_GUARDED_BY(mutex_) = nullptr;  // of the last task
  int num_tasks_ EP_GUARDED_BY(mutex_) = 0;
};

}  // namespace ep::nccl::fake

struct ncclComm {
  std::shared_ptr<ep::nccl::fake::Member> member;
  int num_groups = 0;  // NCCL EP groups on this communicator
};

#endif  // EP_FFI_BACKENDS_NCCL_FAKE_COMMUNICATOR_H_
