// SPDX-License-Identifier: Apache-2.0

// Runs the conformance suite on the nccl backend over the fake.

#include <gtest/gtest.h>

#include "ep_ffi/backends/nccl/group_fixture.h"

namespace ep::nccl {

using testing::Conformance;
INSTANTIATE_TEST_CASE_P(Fake, Conformance, ::testing::Values(FakeNccl()));

}  // namespace ep::nccl
