// SPDX-License-Identifier: Apache-2.0

// Threads that complete ops.
//
// A completed op resumes the XLA program that waits for it, on the completing
// thread. The program may then block for other devices, for example in a psum.
// So neither the progress thread nor a pool of fixed size can complete ops.
// Each completion gets an idle thread, or a new thread. The threads flush
// denormals as XLA:CPU's threads do.

#ifndef EP_FFI_BACKENDS_HOST_ENGINE_WORKERS_H_
#define EP_FFI_BACKENDS_HOST_ENGINE_WORKERS_H_

#include <functional>
#include <memory>

namespace ep::host {

// Thread-safe. Each queued task has an idle or starting thread.
class Workers {
 public:
  Workers();
  // The destructor lets queued tasks run and joins no thread, so that a task
  // may drop the last reference to the owner of this object.
  ~Workers();

  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // Runs `task` soon. The task never waits for another task.
  void Run(std::function<void()> task);

 private:
  struct State;
  // Runs queued tasks. Then waits for more if `keeps_waiting`, else returns.
  static void Loop(std::shared_ptr<State> state, bool keeps_waiting);

  std::shared_ptr<State> state_;
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_ENGINE_WORKERS_H_
