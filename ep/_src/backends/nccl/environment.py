# SPDX-License-Identifier: Apache-2.0
"""Checks the environment variables of XLA, NCCL and NCCL EP.

`REFUSED`, `AGREED` and `PASSED_ON` have all variables NCCL_EP_* of NCCL EP
0.2.0, except NCCL_EP_JIT_*, which installation.py checks.
"""

from __future__ import annotations

import os

from ep._src.base import compat

# For each variable that must be off: its effect and the cure.
REFUSED = {
  "NCCL_EP_COMM_SMS": (
    "replaces max_num_sms, whose limits ep checks: NCCL EP has barriers for 16"
    " SMs only; unset it, and pass max_num_sms to ep_bootstrap"
  ),
  "NCCL_EP_TOKENS_PER_CHUNK": (
    "changes the memory that NCCL EP needs, which ep computes for the default"
    " chunk; unset it"
  ),
  "NCCL_EP_DISABLE_GUARD": (
    "lets an op overwrite rows that a peer still reads; unset it"
  ),
  **dict.fromkeys(
    ("NCCL_EP_HT_EM_LOCAL_DUP", "NCCL_EP_HT_EM_NVLINK_DUP"),
    "makes NCCL EP lay out rows in another way, whose limits ep does not check;"
    " unset it",
  ),
  "NCCL_DEV_API_JIT": (
    "makes NCCL write network structs of its newest version, but the kernels of"
    " NCCL EP read the structs of NCCL 2.30.7; unset it"
  ),
}
_OFF = ("", "0", "false", "off")

# For each variable that must be equal on all processes: the default. NCCL EP
# checks numbers of stages and pipelines at the first op. With equal numbers,
# the op fails on all ranks, and no rank waits for another.
AGREED = {
  "EP_NCCL_COMMUNICATOR": "own",
  "NCCL_EP_DISPATCH_NUM_STAGES": "(unset)",
  "NCCL_EP_DISPATCH_NUM_PIPELINES": "(unset)",
  "NCCL_EP_COMBINE_NUM_STAGES_G2S": "(unset)",
  "NCCL_EP_COMBINE_NUM_STAGES_S2G": "(unset)",
  "NCCL_EP_COMBINE_NUM_PIPELINES": "(unset)",
}

# These variables may differ between processes. Two have no effect: the kernels
# that we use have no timeout, and NCCL_EP_JIT_SOURCE_DIR overrides the home.
PASSED_ON = (
  "NCCL_EP_DEBUG",
  "NCCL_EP_ENV_VERBOSE",
  "NCCL_EP_HOME",
  "NCCL_EP_PREPROCESS_NUM_SMS",
  "NCCL_EP_SHUFFLE_SMS",
  "NCCL_EP_TIMEOUT_MS",
)

# With other values of these flags, XLA may run a collective on the stream of
# the program while an op runs on the stream of collectives. Each of the two may
# then hold resources of the GPU that the other waits for.
_SAFE_XLA_FLAGS = {
  "--xla_gpu_enable_latency_hiding_scheduler": ("true", "1"),
  "--xla_gpu_experimental_parallel_collective_overlap_limit": ("1",),
}


def check() -> None:
  """Raises `ValueError` for variables with which ops might be wrong or wait."""
  for variable, effect in REFUSED.items():
    value = os.environ.get(variable, "")
    if value.lower() not in _OFF:
      raise ValueError(
        f"ep_bootstrap: {variable} = {value} {effect}. See docs/gpu.md."
      )
  flags = compat.xla_flags()
  for name, safe in _SAFE_XLA_FLAGS.items():
    flag = flags.get(name, name)
    _, _, value = flag.partition("=")
    if value and value.lower() not in safe:
      raise ValueError(
        f"ep_bootstrap: $XLA_FLAGS has {flag}, with which XLA may run its"
        " collectives beside the kernels of NCCL EP, so that ranks wait for"
        ' one another indefinitely; remove the flag, or pass backend="xla".'
      )


def settings() -> dict[str, str]:
  """Returns the values of the variables that all processes must agree on."""
  return {v: os.environ.get(v) or default for v, default in AGREED.items()}
