// SPDX-License-Identifier: Apache-2.0

// A fake of the CUDA driver, NCCL and NCCL EP. It works on host memory, and the
// ranks are threads of one process.
//
// It defines the functions of libraries.h, and the stream functions that
// ep_bench calls, under their real names and with the real headers. A test that
// links it with -rdynamic has thereby loaded the libraries, so the backend
// needs no code for the sake of tests. A call that the real libraries would
// answer with an assertion, a trap, a hang or an invalid write is a violation.
// The fake records violations, and tests expect that there are none. A call
// that the real libraries refuse with an error code, the fake refuses too.

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

// The properties of the machine. A test may change them before it creates a
// group.
struct Machine {
  int num_devices = 8;
  int compute_capability_major = 9;
  int shared_bytes = 232448;            // of a block of threads
  size_t free_bytes = size_t{1} << 40;  // of a device's memory
  int nvlink_ranks = 0;                 // of a communicator; 0: all of them
  bool device_api = true;               // of NCCL
  int nccl_version = 23007;
  int nccl_ep_version = 200;
  // A rank that waits longer than this for others is a violation.
  double timeout_s = 30;
  // The name of a function that enqueues. On the device `failing_device` it
  // returns an error code.
  std::string failing;
  int failing_device = 0;
};

Machine& TheMachine();

// Bytes of scratch memory at the end of a handle's memory. Each dispatch and
// combine overwrites them, and none reads what another has left there.
constexpr int64_t kScratchBytes = 1024;

// Returns the violations so far, in order, and forgets them.
std::vector<std::string> TakeViolations();

// Counts of the objects that were created and are not destroyed yet, by what
// they are. Of contexts it is how often they are retained.
using Resources = std::map<std::string, size_t>;
Resources CountResources();

// Returns a new stream, as XLA would own it. Its destruction waits for the
// tasks that were enqueued.
std::shared_ptr<CUstream_st> NewStream(int device);
void Synchronize(CUstream stream);
// Enqueues work of somebody else.
void Enqueue(CUstream stream, std::function<void()> task);
// Returns what was enqueued since the last call: the names of kernels, and of
// functions that enqueue.
std::vector<std::string> TakeEnqueued(CUstream stream);

// Marks this thread as inside an FFI handler with this EpHandle.mem, for as
// long as the object lives. A handler must neither wait nor allocate, and it
// must open handles of NCCL EP in exactly these bytes.
class InHandler {
 public:
  InHandler(const void* mem, size_t bytes);
  ~InHandler();
  InHandler(const InHandler&) = delete;
  InHandler& operator=(const InHandler&) = delete;
};

}  // namespace ep::nccl::fake

#endif  // EP_FFI_BACKENDS_NCCL_FAKE_FAKE_H_
