// SPDX-License-Identifier: Apache-2.0

// Tests that the fake CUDA driver catches invalid calls.

#include <cuda.h>
#include <gtest/gtest.h>

#include "ep_ffi/backends/nccl/fake/fake.h"
#include "ep_ffi/backends/nccl/fake/test_ranks.h"
#include "ep_ffi/backends/nccl/kernels.h"

namespace ep::nccl::fake {
namespace {

// Uses the driver alone. The context of device 0 is current.
class CudaTest : public FakeTest {
 protected:
  void SetUp() override {
    FakeTest::SetUp();
    ASSERT_EQ(CUDA_SUCCESS, cuInit(0));
    CUcontext context;
    ASSERT_EQ(CUDA_SUCCESS, cuDevicePrimaryCtxRetain(&context, 0));
    ASSERT_EQ(CUDA_SUCCESS, cuCtxPushCurrent(context));
    ASSERT_EQ(CUDA_SUCCESS, cuModuleLoadData(&module_, "image"));
  }
  void TearDown() override {
    cuModuleUnload(module_);
    EXPECT_EQ(CUDA_SUCCESS, cuCtxPopCurrent(nullptr));
    EXPECT_EQ(CUDA_SUCCESS, cuDevicePrimaryCtxRelease(0));
    EXPECT_EQ("", Violations());
    EXPECT_EQ(Resources(), CountResources());
  }

  // Launches a kernel that has nothing to do.
  CUresult Launch(CUstream stream, unsigned num_blocks, unsigned block_size) {
    CUfunction function;
    EXPECT_EQ(CUDA_SUCCESS,
              cuModuleGetFunction(&function, module_, "EpSumChoices"));
    Routing routing = {};
    void* parameters[] = {&routing};
    return cuLaunchKernel(function, num_blocks, 1, 1, block_size, 1, 1, 0,
                          stream, parameters, nullptr);
  }

  CUmodule module_ = nullptr;
};

TEST_F(CudaTest, WaitsAndAllocationsInAHandlerAreCaught) {
  void* memory = nullptr;
  CUmodule module = nullptr;
  CUcontext context = nullptr;
  const InHandler handler(nullptr, 0);
  cuCtxSynchronize();
  ExpectViolation("cuCtxSynchronize: waits or allocates");
  cuMemHostAlloc(&memory, 8, 0);
  ExpectViolation("cuMemHostAlloc: waits or allocates");
  cuModuleLoadData(&module, "image");
  ExpectViolation("cuModuleLoadData: waits or allocates");
  cuDevicePrimaryCtxRetain(&context, 0);
  ExpectViolation("cuDevicePrimaryCtxRetain: waits or allocates");
  EXPECT_EQ(nullptr, memory);
  EXPECT_EQ(nullptr, module);
  cuDevicePrimaryCtxRelease(0);
  ExpectViolation("cuDevicePrimaryCtxRelease: waits or allocates");
}

TEST_F(CudaTest, LaunchesHaveLimits) {
  const auto stream = NewStream(0);
  EXPECT_EQ(CUDA_SUCCESS, Launch(stream.get(), 1, 1024));
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, Launch(stream.get(), 0, 256));
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, Launch(stream.get(), 1, 1025));
}

TEST_F(CudaTest, UnknownNamesAreNotFound) {
  CUfunction function;
  EXPECT_EQ(CUDA_ERROR_NOT_FOUND,
            cuModuleGetFunction(&function, module_, "EpNothing"));
}

TEST_F(CudaTest, AStreamOfAnotherDeviceIsCaught) {
  const auto stream = NewStream(1);
  EXPECT_NE(CUDA_SUCCESS, Launch(stream.get(), 1, 1));
  ExpectViolation("not that of 1");
}

TEST_F(CudaTest, TheDefaultStreamIsCaught) {
  EXPECT_NE(CUDA_SUCCESS, Launch(nullptr, 1, 1));
  ExpectViolation("no such stream");
}

TEST_F(CudaTest, AMissingContextIsCaught) {
  const auto stream = NewStream(0);
  CUcontext context;
  cuCtxPopCurrent(&context);
  EXPECT_NE(CUDA_SUCCESS, cuMemsetD32Async(0, 0, 0, stream.get()));
  cuCtxPushCurrent(context);
  ExpectViolation("no context is current");
}

TEST_F(CudaTest, OnlyMappedMemoryHasADeviceAddress) {
  for (unsigned flags : {0, CU_MEMHOSTALLOC_DEVICEMAP}) {
    void* memory;
    ASSERT_EQ(CUDA_SUCCESS, cuMemHostAlloc(&memory, 8, flags));
    CUdeviceptr address;
    EXPECT_EQ(flags ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE,
              cuMemHostGetDevicePointer(&address, memory, 0));
    cuMemFreeHost(memory);
  }
}

TEST_F(CudaTest, FreeingUnknownMemoryIsCaught) {
  int nothing;
  cuMemFreeHost(&nothing);
  ExpectViolation("did not make it");
}

}  // namespace
}  // namespace ep::nccl::fake
