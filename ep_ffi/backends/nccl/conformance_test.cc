// SPDX-License-Identifier: Apache-2.0

// Runs the conformance suite on the nccl backend over the fake.

#include "ep_ffi/testing/conformance.h"

#include "ep_ffi/backends/nccl/testing/group_fixture.h"

namespace ep::nccl {

EP_INSTANTIATE_CONFORMANCE(Fake, FakeNccl());
EP_INSTANTIATE_CONFORMANCE(Lent, LentNccl());

}  // namespace ep::nccl
