// SPDX-License-Identifier: Apache-2.0

// The kernels of the backend, compiled for the host.

#ifndef EP_FFI_BACKENDS_NCCL_FAKE_KERNEL_TABLE_H_
#define EP_FFI_BACKENDS_NCCL_FAKE_KERNEL_TABLE_H_

#include <functional>
#include <string>

namespace ep::nccl::fake {

// Returns whether there is a kernel of this name.
bool HasKernel(const std::string& name);

// Returns a function that runs a kernel on `num_blocks` blocks of threads. The
// parameters are copied now, as a launch copies them.
std::function<void()> BindKernel(const std::string& name, unsigned num_blocks,
                                 unsigned block_size, void** parameters);

}  // namespace ep::nccl::fake

#endif  // EP_FFI_BACKENDS_NCCL_FAKE_KERNEL_TABLE_H_
