// SPDX-License-Identifier: Apache-2.0

// Threads that complete ops.
//
// Completing an op resumes the XLA program that waits for it, on the thread
// that completes it, and that program may block for other devices (a psum
// does). So completions can share neither the progress thread nor a pool of
// fixed size: each gets an idle thread, or a new one.

#ifndef EP_FFI_BACKENDS_HOST_ENGINE_WORKERS_H_
#define EP_FFI_BACKENDS_HOST_ENGINE_WORKERS_H_

#include <functional>
#include <memory>

namespace ep::host {

// Thread-safe. There is always an idle thread, or one about to start, for each
// task that waits.
class Workers {
 public:
  Workers();
  // Lets the accepted tasks still run. Their threads end on their own, so that
  // a task may drop the last reference to the owner of this object.
  ~Workers();

  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // Runs `task` soon; never waits for another task to end.
  void Run(std::function<void()> task);

 private:
  struct State;
  // Runs queued tasks; then waits for more if `keeps_waiting`, else returns.
  static void Loop(std::shared_ptr<State> state, bool keeps_waiting);

  std::shared_ptr<State> state_;
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_ENGINE_WORKERS_H_
