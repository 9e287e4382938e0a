// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/nccl/fake/checks.h"

#include <cuda.h>
#include <nccl.h>
#include <nccl_ep.h>

#include <cstdint>

#include "ep_ffi/backends/nccl/fake/driver.h"
#include "ep_ffi/backends/nccl/fake/fake.h"

namespace ep::nccl::fake {
namespace {

struct Violations {
  Mutex mutex;
  std::vector<std::string> sentences EP_GUARDED_BY(mutex);
};

Violations& TheViolations() {
  // Leaked, because threads may outlive the destructors of static objects.
  static Violations* violations = new Violations();
  return *violations;
}

struct Handler {
  bool entered = false;
  uintptr_t begin = 0;
  size_t bytes = 0;
};

thread_local Handler handler;

}  // namespace

Machine& TheMachine() {
  static Machine* machine = new Machine();
  return *machine;
}

void RecordViolation(const std::string& sentence) {
  Violations& violations = TheViolations();
  MutexLock lock(violations.mutex);
  violations.sentences.push_back(sentence);
}

std::vector<std::string> TakeViolations() {
  Violations& violations = TheViolations();
  MutexLock lock(violations.mutex);
  return std::exchange(violations.sentences, {});
}

Resources CountResources() {
  return {{"contexts", CountRetainedContexts()},
          {"modules", LiveObjects<CUmod_st>::Get().size()},
          {"host allocations", LiveObjects<std::byte>::Get().size()},
          {"communicators", LiveObjects<ncclComm>::Get().size()},
          {"groups", LiveObjects<ncclEpGroup>::Get().size()},
          {"handles", LiveObjects<ncclEpHandle>::Get().size()}};
}

void Contract::RequireNoHandler() {
  Require(!IsInHandler(), "waits or allocates inside a handler");
}

InHandler::InHandler(const void* mem, size_t bytes) {
  handler = {true, reinterpret_cast<uintptr_t>(mem), bytes};
}

InHandler::~InHandler() { handler = {}; }

bool IsInHandler() { return handler.entered; }

bool HandlerMemHolds(const void* begin, size_t bytes) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(begin);
  return at >= handler.begin && at + bytes <= handler.begin + handler.bytes;
}

}  // namespace ep::nccl::fake
