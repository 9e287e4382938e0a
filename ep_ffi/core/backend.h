// SPDX-License-Identifier: Apache-2.0

// The interface between the FFI handlers and a backend.
//
// A handler decodes its buffers, builds a `Call`, and calls one method of the
// `Group` that the op names. A backend is a folder in ep_ffi/backends. It has a
// subclass of `Group` and a C function that creates a group (bootstrap.cc).
//
// Three methods serve the five ops: `Prepare`; `Scatter`, which copies token
// rows to slots (dispatch, backward of combine); and `Gather`, which sums slots
// into token rows (combine, backward of dispatch). `Call::op` names the op in
// messages.
//
// Ordering: any thread may call any op of a group, in any order and
// concurrently. The order may differ between ranks. A backend matches the calls
// of its ranks by (run id, site id), never by order of arrival.
//
// Completion: a method returns without waiting for a peer. The backend calls
// `done` exactly once, from any thread, possibly before the method returns. The
// buffers stay valid until `done` is called. If one rank fails, the run fails
// on every rank of the group.
//
// GPU streams: an op is done when it is enqueued. All ranks call the ops in the
// same order. If the device finds a fault later, the outputs are NaN on every
// rank, and the same later ep_prepare fails on every rank. Faulty routing drops
// every choice: the counts are 0, and the totals are -1.
//
// No method throws.

#ifndef EP_FFI_CORE_BACKEND_H_
#define EP_FFI_CORE_BACKEND_H_

#include <cstddef>
#include <cstdint>
#include <functional>
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

// The contents of dispatch's output rows past the last expert's slab.
enum class Tail : int32_t { kUnspecified, kZero, kNan };

// The static configuration of a layer, from the attributes of the op.
struct Layer {
  int64_t top_k;
  int64_t alignment;
  int64_t capacity;
  bool drop;  // overflow policy
  Tail tail;
  int64_t fingerprint = 0;  // a hash of the layer's and group's configurations
  bool checked = false;     // checked mode; see ep/_src/base/contexts.py
  int64_t wire = 0;         // fp8 transport: an index into WIRES, base/layer.py
  std::string name = {};    // for messages
};

// One op in one compiled program. A site lives as long as its executable.
struct Site {
  Layer layer;
  std::string program;  // name of the lowered module, unique in the group
  int64_t position;     // index of the op in that module
  int64_t clone;        // index of this copy if XLA duplicated the op
  // A hash of program, position and clone. The id is equal on every rank, and
  // unique among all ops, even in two executables of one module.
  uint64_t id;
};

// Makes a site and computes its id.
Site MakeSite(Layer layer, std::string program, int64_t position,
              int64_t clone);

// A thread pool, valid during a call.
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
  int64_t run_id;      // XLA's unique launch id, shared by all local ranks
  int32_t device;      // XLA's number of the device
  Executor* executor;  // CPU only
  void* stream;        // GPU only: the stream of the op
  void* communicator;  // GPU only: XLA's communicator of the EP domain or null
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
  // and the index along the data axes. Null if unknown.
  const int32_t* place;
  bool index_is_int64;
  int64_t num_tokens;
  std::byte* mem;
  int64_t mem_bytes;
  int32_t* group_sizes;        // [L]
  int32_t* token_counts;       // [L]
  int32_t* total_recv_tokens;  // [1]
  int32_t* dropped_counts;     // [L]
  int32_t* max_recv_tokens;    // [1]
  uint8_t* kept;               // [T, K]
};

// Copies token rows to slots: dispatch, and the backward of combine.
struct ScatterArgs {
  Mem mem;
  ConstRows tokens;           // [T, H]
  const float* topk_weights;  // [T, K], or null
  Rows slots;                 // [C, H]
  float* slot_weights;        // [C], null if topk_weights is null
};

// Sums slots into token rows: combine, and the backward of dispatch.
struct GatherArgs {
  Mem mem;
  ConstRows slots;            // [C, H]
  const float* slot_weights;  // [C], or null
  Rows tokens;                // [T, H]
  // [T, K], output: the weight of each choice (backward of dispatch). Null in
  // combine, which multiplies the rows by slot_weights, if any.
  float* topk_weights;
};

// One process's view of the EP domains of a mesh.
class Group {
 public:
  virtual ~Group() = default;

  virtual int64_t num_experts() const = 0;
  virtual int64_t ep_size() const = 0;

  // Returns the object that serves one device of the group, or null. The
  // objects of different devices never wait for each other.
  virtual Group* OnDevice(int32_t) { return this; }

  // Computes the size of EpHandle.mem in bytes, for `num_tokens` per rank.
  // Fails if the group does not support these sizes.
  virtual Status MemBytes(const Layer& layer, int64_t num_tokens,
                          int64_t* out) const = 0;

  // Passes XLA's communicator of the EP domain to the rank on a device. Called
  // before the first op; collective over the domain.
  virtual Status Connect(int32_t, void*) {
    return Status(Code::kInternal, "this backend takes no communicators");
  }

  virtual void Prepare(Call call, const PrepareArgs& args) = 0;
  virtual void Scatter(Call call, const ScatterArgs& args) = 0;
  virtual void Gather(Call call, const GatherArgs& args) = 0;

  // Fails pending and later calls of a run in this process with `status`. If a
  // program uses several groups, a failure in one group stops the program on
  // the group's ranks, so peers in other groups must stop waiting.
  virtual void FailRun(int64_t run_id, const Status& status) = 0;

  // Waits for the ops on all streams. Returns the first device fault that no op
  // has reported.
  virtual Status Check() { return Status(); }

  // Closes the group. Pending and later calls of this process fail, and so do
  // calls of peers that wait for this process. If a peer already waits, returns
  // an error, but closes the group anyway.
  virtual Status Close() = 0;
};

}  // namespace ep

#endif  // EP_FFI_CORE_BACKEND_H_
