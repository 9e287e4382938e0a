// SPDX-License-Identifier: Apache-2.0

// Two ops that wait for a peer, which is an impostor.

#ifndef EP_FFI_BACKENDS_HOST_FUZZ_CONVERSATION_H_
#define EP_FFI_BACKENDS_HOST_FUZZ_CONVERSATION_H_

#include "ep_ffi/backends/host/testing/impostor.h"
#include "ep_ffi/testing/ranks.h"

namespace ep::host {

// Returns the descriptor of a segment of one page, with the choices that
// ep_prepare stages for the sample. A mover can read them as rows.
int SampleSegment();

class Conversation {
 public:
  // Posts ep_prepare and ep_combine on rank 0.
  Conversation();

  Impostor& impostor() { return *group_.impostor; }
  // Lets the impostor leave, which ends both ops. Returns whether any of them
  // succeeded.
  bool End();

 private:
  GroupWithImpostor group_;
  testing::StepPtr prepare_, combine_;
};

}  // namespace ep::host

#endif  // EP_FFI_BACKENDS_HOST_FUZZ_CONVERSATION_H_
