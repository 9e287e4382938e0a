// SPDX-License-Identifier: Apache-2.0

// Two ops that wait for a peer, who is an impostor.

#ifndef EP_FFI_BACKENDS_HOST_FUZZ_CONVERSATION_H_
#define EP_FFI_BACKENDS_HOST_FUZZ_CONVERSATION_H_

#include "ep_ffi/backends/host/testing/impostor.h"
#include "ep_ffi/testing/ranks.h"

namespace ep::host {

// The descriptor of a segment of one page, with what ep_prepare stages for the
// sample. Taken for rows, these are as good as others.
int SampleSegment();

class Conversation {
 public:
  // Posts ep_prepare and ep_combine on rank 0.
  Conversation();

  Impostor& impostor() { return *group_.impostor; }
  // The impostor leaves, and both ops end. Whether any of them succeeded.
  bool End();

 private:
  GroupWithImpostor group_;
  testing::StepPtr prepare_, combine_;
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_FUZZ_CONVERSATION_H_
