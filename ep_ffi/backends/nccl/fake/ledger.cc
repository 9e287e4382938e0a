// SPDX-License-Identifier: Apache-2.0
#include "ep_ffi/backends/nccl/fake/ledger.h"

#include <cuda.h>
#include <nccl.h>
#include <nccl_ep.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ep_ffi/backends/nccl/fake/driver.h"
#include "ep_ffi/backends/nccl/fake/fake.h"

namespace ep::nccl::fake {
namespace {

struct Violations {
  std::mutex mutex;
  std::vector<std::string> sentences;
};

Violations& TheViolations() {
  static Violations* violations = new Violations();  // outlives all threads
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
  std::lock_guard<std::mutex> lock(violations.mutex);
  violations.sentences.push_back(sentence);
}

std::vector<std::string> TakeViolations() {
  Violations& violations = TheViolations();
  std::lock_guard<std::mutex> lock(violations.mutex);
  return std::exchange(violations.sentences, {});
}

Holdings CountHoldings() {
  return {CountRetainedContexts(),
          Living<CUmod_st>::Get().size(),
          CountHostAllocations(),
          Living<ncclComm>::Get().size(),
          Living<ncclEpGroup>::Get().size(),
          Living<ncclEpHandle>::Get().size()};
}

bool Holdings::operator==(const Holdings& other) const {
  return contexts == other.contexts && modules == other.modules &&
         host_allocations == other.host_allocations &&
         communicators == other.communicators && groups == other.groups &&
         handles == other.handles;
}

std::ostream& operator<<(std::ostream& out, const Holdings& holdings) {
  return out << holdings.contexts << " contexts, " << holdings.modules
             << " modules, " << holdings.host_allocations
             << " host allocations, " << holdings.communicators
             << " communicators, " << holdings.groups << " groups, "
             << holdings.handles << " handles";
}

void Contract::DemandNoHandler() {
  Demand(!IsInHandler(), "waits or allocates inside a handler");
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
