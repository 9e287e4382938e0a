// SPDX-License-Identifier: Apache-2.0

// The interface between the FFI handlers and a backend.
//
// A handler decodes its buffers, builds a `Call`, and calls one method of the
// `Group` that the op names. A backend is a folder below ep_ffi/backends that
// implements `Group`, plus a C function that creates it (its bootstrap.cc).
//
// Three methods serve the five ops, since the movers are two operations seen
// from two sides: `Scatter` moves token rows to slots (dispatch, and the
// backward of combine), and `Gather` sums slots into token rows (combine, and
// the backward of dispatch). `Call::op` tells which op it is, for messages.
//
// Ordering: the ops of a group may be called from any thread, in any order,
// several at once; ranks may differ in that order. A backend matches the calls
// of its ranks by identity, (run id, site id), never by arrival.
//
// Completion: a method returns without waiting for a peer. `done` is called
// exactly once, from any thread, possibly before the method returns; until
// then the buffers stay valid. A failure on one rank is a failure of the same
// run on every rank of the group.
//
// With a stream, an op is done when it is enqueued, in the order of the calls,
// which is then the same on every rank. A fault that the device finds later
// makes the outputs NaN on every rank and fails a later ep_prepare, the same
// one on every rank. The faulty routing keeps no choice: its counts are 0, and
// its totals -1.
//
// Nothing here throws.

#ifndef EP_FFI_CORE_BACKEND_H_
#define EP_FFI_CORE_BACKEND_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "ep_ffi/core/status.h"

namespace ep {

enum class Op : int32_t {
  kPrepare,
  kDispatch,
  kCombine,
  kDispatchBwd,
  kCombineBwd,
};

const char* OpName(Op op);  // "ep_dispatch"

// Returns the name of an op for messages: ep_dispatch(layer "moe_3").
std::string OpName(Op op, const std::string& layer);

enum class DType : int32_t { kFloat32, kBFloat16, kFloat16 };

int64_t ByteWidth(DType dtype);

// The rows that dispatch writes past the last slab.
enum class Tail : int32_t { kUnspecified, kZero, kNan };

// The static configuration of a layer, from the op's own attributes.
struct Layer {
  int64_t top_k;
  int64_t alignment;
  int64_t capacity;
  bool drop;  // overflow policy
  Tail tail;
  int64_t fingerprint = 0;  // a hash of all that layer and group are made of
  bool checked = false;     // see ep/_src/base/checked.py
  int64_t wire = 0;         // an index of WIRES of ep/_src/base/config.py
  std::string name = {};    // for messages
};

// One op in one compiled program; lives as long as the executable.
struct Site {
  Layer layer;
  std::string program;  // name of the lowered module, unique in the group
  int64_t position;     // of the op in that module
  int64_t clone;        // number of this copy of the op, if XLA made several
  // Hash of program, position and clone. It is the same on every rank, and
  // tells apart the ops of all executables, also of those made of one module.
  uint64_t id;
};

// Returns a site with its id.
Site MakeSite(Layer layer, std::string program, int64_t position,
              int64_t clone);

// A pool of threads that is valid during a call.
class Executor {
 public:
  virtual ~Executor() = default;
  virtual void Schedule(std::function<void()> task) = 0;
  virtual int64_t num_threads() const = 0;
};

// One execution of one op on one device.
struct Call {
  Op op;
  const Site* site;
  int64_t run_id;      // of the launch; equal on all ranks, unique in time
  int32_t device;      // as XLA numbers it
  Executor* executor;  // on CPU
  void* stream;        // on a GPU, to enqueue the op on
  void* communicator;  // on a GPU: XLA's of the EP domain, if it lends it
  std::function<void(Status)> done;
};

// A dense [count, width] matrix of token rows.
template <typename Byte>
struct RowsOf {
  Byte* data;
  int64_t count;
  int64_t width;
  DType dtype;

  int64_t row_bytes() const { return width * ByteWidth(dtype); }
};
using Rows = RowsOf<std::byte>;
using ConstRows = RowsOf<const std::byte>;

struct Mem {
  const std::byte* data;
  int64_t bytes;
};

struct PrepareArgs {
  const void* topk_idx;  // [T, K], int32 or int64
  // [2], the position of this rank in the program's mesh: domain * P + rank,
  // and the index along the data axes alone. Null if unknown.
  const int32_t* place;
  bool index_is_int64;
  int64_t num_tokens;
  int64_t top_k;
  std::byte* mem;
  int64_t mem_bytes;
  int32_t* group_sizes;        // [L]
  int32_t* token_counts;       // [L]
  int32_t* total_recv_tokens;  // [1]
  int32_t* dropped_counts;     // [L]
  int32_t* max_recv_tokens;    // [1]
  uint8_t* kept;               // [T, K]
};

// Token rows to slots: dispatch, and the backward of combine.
struct ScatterArgs {
  Mem mem;
  ConstRows tokens;           // [T, H]
  const float* topk_weights;  // [T, K], or null
  Rows slots;                 // [C, H]
  float* slot_weights;        // [C], null when topk_weights is
};

// Slots to token rows: combine, and the backward of dispatch.
struct GatherArgs {
  Mem mem;
  ConstRows slots;            // [C, H]
  const float* slot_weights;  // [C], or null
  Rows tokens;                // [T, H]
  // [T, K], receives the weight of each choice (backward of dispatch). If null,
  // slot_weights scale the rows instead, if there are any (combine).
  float* topk_weights;
};

// The host memory that a process keeps between ops, in bytes.
struct HostMemory {
  int64_t reserved = 0;
  int64_t resident = 0;  // the part that was ever touched
};

// The EP domains of a mesh, as one process sees them.
class Group {
 public:
  virtual ~Group() = default;

  virtual int64_t num_experts() const = 0;
  virtual int64_t ep_size() const = 0;

  // Returns the part of the group that runs the ops of a device. No part waits
  // for another one of the same process. Null if the device has none.
  virtual Group* OnDevice(int32_t) { return this; }

  // Computes the bytes of EpHandle.mem for a layer and the tokens of a rank.
  // Fails if the group cannot serve them.
  virtual Status MemBytes(const Layer& layer, int64_t num_tokens,
                          int64_t* out) const = 0;

  // Gives the rank of a device XLA's communicator of its domain, before the
  // first op. Collective over the domain.
  virtual Status Connect(int32_t, void*) {
    return Status(Code::kInternal, "this backend takes no communicators");
  }

  virtual HostMemory Memory() { return {}; }

  // Traces the ops from now on, for a file that StopTrace and Close write.
  virtual Status StartTrace(const std::string&) {
    return Status(Code::kInvalidArgument,
                  "this backend has no trace yet; use backend=\"host\"");
  }
  virtual Status StopTrace() { return Status(); }
  // Returns for how many seconds a rank of this process has waited for others
  // in exchanges that were traced; a mean over its ranks.
  virtual double Waited() { return 0; }

  virtual void Prepare(Call call, const PrepareArgs& args) = 0;
  virtual void Scatter(Call call, const ScatterArgs& args) = 0;
  virtual void Gather(Call call, const GatherArgs& args) = 0;

  // Fails a run in this process: its pending and later calls get `status`. A
  // program may use several groups. A failure in one group ends the program on
  // its ranks, and their peers in the other groups must stop waiting.
  virtual void FailRun(int64_t run_id, const Status& status) = 0;

  // Waits for what was enqueued on a stream. Returns the first fault that it
  // found and no op has reported.
  virtual Status Check() { return Status(); }

  // Ends the group: pending and later calls fail, in this process at once and
  // in its peers as soon as they wait for it. The group is closed even if this
  // fails, which it may because a peer already waits.
  virtual Status Close() = 0;
};

}  // namespace ep

#endif  // EP_FFI_CORE_BACKEND_H_
