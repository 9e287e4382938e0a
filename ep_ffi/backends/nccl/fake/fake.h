// SPDX-License-Identifier: Apache-2.0

// A fake of the CUDA driver, NCCL and NCCL EP. The fake works on host memory,
// and ranks are threads of one process.
//
// The fake defines the functions of libraries.h with their real names and
// headers. A test links the fake with -rdynamic, so the backend finds the
// functions in the process and needs no code for tests.
//
// A call is a violation if the real libraries would assert, trap, hang or write
// out of bounds. The fake records violations, and tests expect none. The fake
// returns an error code where the real libraries do.

#ifndef EP_FFI_BACKENDS_NCCL_FAKE_FAKE_H_
#define EP_FFI_BACKENDS_NCCL_FAKE_FAKE_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace ep::nccl::fake {

// The properties of the machine. Tests change them before they create groups.
struct Machine {
  int num_devices = 8;
  int compute_capability_major = 9;
  int shared_bytes = 232448;            // per thread block
  size_t free_bytes = size_t{1} << 40;  // per device
  int poor_device = -1;                 // has no free bytes
  int nvlink_ranks = 0;                 // per NVLink domain; 0: all ranks
  int num_hosts = 2;                    // different host names of a domain
  bool gin = true;         // whether the GPU can use the network by itself
  bool device_api = true;  // whether NCCL has a device API
  int nccl_version = 23007;
  // The longest time that a rank may wait for other ranks without a violation.
  double timeout_s = 30;
  // A function of this name returns an error code on `failing_device`.
  std::string failing;
  int failing_device = 0;
};

Machine& TheMachine();

// Bytes of scratch memory at the end of a handle's memory. Each dispatch and
// combine overwrites these bytes. No op reads bytes of another op.
constexpr int64_t kScratchBytes = 1024;

// Removes and returns all violations, in order.
std::vector<std::string> TakeViolations();

// The number of live objects by kind. A context counts once per retain.
using Resources = std::map<std::string, size_t>;
Resources CountResources();

// Creates a stream, whose destructor waits for the enqueued tasks.
std::shared_ptr<CUstream_st> NewStream(int device);
void Synchronize(CUstream stream);
// Enqueues a task of the test, which is no call of a library.
void Enqueue(CUstream stream, std::function<void()> task);
// Returns the names of the kernels and functions that were enqueued on the
// stream since the last call.
std::vector<std::string> TakeEnqueued(CUstream stream);

// A scope in which this thread counts as inside an FFI handler with this
// EpHandle.mem. A handler must neither wait nor allocate, and must open handles
// of NCCL EP in these bytes.
class InHandler {
 public:
  InHandler(const void* mem, size_t bytes);
  ~InHandler();
  InHandler(const InHandler&) = delete;
  InHandler& operator=(const InHandler&) = delete;
};

}  // namespace ep::nccl::fake

#endif  // EP_FFI_BACKENDS_NCCL_FAKE_FAKE_H_
