// SPDX-License-Identifier: Apache-2.0

// A stand-in for the CUDA driver, NCCL and NCCL EP, on host memory, with ranks
// as threads of one process.
//
// It defines the functions of libraries.h, and those of streams that ep_bench
// calls, under their real names, against the real headers, so a test that links
// it with -rdynamic has "loaded" them, and the backend needs no seam to be
// tested. What the real libraries would answer with an assertion, a trap, a
// hang or a wild write is a violation: recorded here, for the test to expect
// none. What they refuse with an error code, the fake refuses too.

#ifndef EP_FFI_BACKENDS_NCCL_FAKE_FAKE_H_
#define EP_FFI_BACKENDS_NCCL_FAKE_FAKE_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

namespace ep::nccl::fake {

// What there is to be found. A test may change it before it makes a group.
struct Machine {
  int num_devices = 8;
  int compute_capability_major = 9;
  int shared_bytes = 232448;            // of a block of threads
  size_t free_bytes = size_t{1} << 40;  // of a device's memory
  int nvlink_ranks = 0;                 // of a communicator; 0: all of them
  bool device_api = true;               // of NCCL
  int nccl_version = 23007;
  int nccl_ep_version = 200;
  // How long a rank waits for others before it is a violation.
  double patience_s = 30;
  // A function that enqueues and, with an error code, fails on this device.
  std::string failing;
  int failing_device = 0;
};

Machine& TheMachine();

// The end of a handle's memory, where each op of NCCL EP that moves rows leaves
// what it calculated with. None reads what another has left.
constexpr int64_t kScratchBytes = 1024;

// The violations so far, in order; forgets them.
std::vector<std::string> TakeViolations();

// What has been made and not yet destroyed.
struct Holdings {
  size_t contexts = 0;  // times that a primary context is retained
  size_t modules = 0;
  size_t host_allocations = 0;
  size_t communicators = 0;
  size_t groups = 0;
  size_t handles = 0;

  bool operator==(const Holdings& other) const;
};

std::ostream& operator<<(std::ostream& out, const Holdings& holdings);

Holdings CountHoldings();

// A stream as XLA would own it: a thread that does what is enqueued, in order.
// Its end waits for that.
std::shared_ptr<CUstream_st> NewStream(int device);
void Synchronize(CUstream stream);

// Records what is enqueued on a stream, from here to the end, instead of doing
// it, as XLA does to make a command buffer. Meanwhile nothing may be loaded
// onto the device.
class Capture {
 public:
  explicit Capture(CUstream stream);
  ~Capture();
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  void End();
  // Enqueues it all; as often as one likes, on any stream of the device.
  void Replay(CUstream stream) const;

 private:
  struct Recorded;
  const std::unique_ptr<Recorded> recorded_;
};

// The most blocks that a kernel was launched with since this was last called.
unsigned TakeLargestGrid(const std::string& kernel);

// While it lives, this thread is inside an FFI handler whose routing lies in
// `mem`. There nothing may wait or allocate, and a handle of NCCL EP is opened
// on just these bytes.
class InHandler {
 public:
  InHandler(const void* mem, size_t bytes);
  ~InHandler();
  InHandler(const InHandler&) = delete;
  InHandler& operator=(const InHandler&) = delete;
};

}  // namespace ep::nccl::fake

#endif  // EP_FFI_BACKENDS_NCCL_FAKE_FAKE_H_
