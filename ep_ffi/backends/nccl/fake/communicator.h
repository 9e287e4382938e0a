// SPDX-License-Identifier: Apache-2.0

// Where the ranks of an NCCL communicator meet, on the host or on a stream.

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

#include "ep_ffi/backends/nccl/fake/ledger.h"
#include "ep_ffi/core/mutex.h"
#include "ep_ffi/core/thread_annotations.h"

namespace ep::nccl::fake {

// The ranks of a communicator, which meet in the same order: the n-th call of
// one rank meets the n-th call of each other.
//
// Thread-safe: each rank calls from a thread of its own. The lock keeps that a
// meeting is in the table until its last rank comes, and is over from then on.
class Clique {
 public:
  explicit Clique(int size);

  int size() const { return size_; }

  // What each rank brought, by rank; and a number for this meeting, which no
  // other has.
  struct Met {
    uint64_t number = 0;
    std::vector<const void*> brought;

    template <typename T>
    const T& From(int rank) const {
      return *static_cast<const T*>(brought[rank]);
    }
  };

  // Waits for all ranks to come to their next meeting; what they bring stays
  // theirs until the meeting after. False if this rank was aborted, or after a
  // violation: ranks that come for different purposes, or not at all.
  bool Meet(int rank, const std::string& purpose, const void* mine, Met* met);

  // This rank stops waiting. The others do not: as with NCCL, each must give
  // up by itself.
  void Abort(int rank);

 private:
  struct Meeting {
    std::map<int, std::string> purposes;  // of the ranks that came
    std::vector<const void*> brought;
    bool over = false;
    bool failed = false;
  };

  const int size_;
  const uint64_t first_number_;

  Mutex mutex_;
  CondVar changed_;
  // By rank, the number of its next meeting, and whether it was aborted.
  std::vector<uint64_t> next_ EP_GUARDED_BY(mutex_);
  std::vector<bool> aborted_ EP_GUARDED_BY(mutex_);
  // The meetings that some ranks have come to and others have not, by number.
  std::map<uint64_t, std::shared_ptr<Meeting>> meetings_ EP_GUARDED_BY(mutex_);
};

// A rank's part in a clique, shared by what it has enqueued.
//
// Thread-safe. The lock keeps that all tasks that have not ended are on one
// stream.
class Member {
 public:
  Member(std::shared_ptr<Clique> clique, int rank, int device)
      : clique_(std::move(clique)), rank_(rank), device_(device) {}

  Clique& clique() const { return *clique_; }
  int rank() const { return rank_; }
  int device() const { return device_; }

  // Enqueues `task`, in which this rank meets the others. Two streams at once
  // are a violation, in the replay of what was recorded, too: ranks might come
  // in different orders.
  static ncclResult_t Enqueue(std::shared_ptr<Member> member,
                              Contract& contract, CUstream stream,
                              std::function<void()> task);
  bool IsBusy();

 private:
  bool Admit(const std::string& function, CUstream stream);

  const std::shared_ptr<Clique> clique_;
  const int rank_;
  const int device_;

  Mutex mutex_;
  CUstream stream_ EP_GUARDED_BY(mutex_) = nullptr;  // of the latest task
  int num_tasks_ EP_GUARDED_BY(mutex_) = 0;
};

}  // namespace ep::nccl::fake

struct ncclComm {
  std::shared_ptr<ep::nccl::fake::Member> member;
  int num_groups = 0;  // of NCCL EP
};

#endif  // EP_FFI_BACKENDS_NCCL_FAKE_COMMUNICATOR_H_
