# SPDX-License-Identifier: Apache-2.0
"""Says whether XLA's device kernel can send the rows of an EP domain of GPUs.

XLA:GPU has several implementations of a ragged all-to-all. The device kernel
is one launch, without the host. It runs if both flags below are set, because
it needs symmetric buffers. Otherwise XLA runs a one-shot kernel.

The plugins for CUDA 13 on PyPI show which jaxlib can run it (nobody ran them):

* 0.11.1 is the first version that has both flags. XLA terminates a process that
  sets an unknown flag.
* 0.11.1 refuses an EP domain of several processes (openxla/xla#47146). The
  check is absent from 0.11.2.
* Before 0.12.0 the one-shot kernel writes out of bounds in a domain of more
  than 32 ranks (openxla/xla#47283). From 0.12.0 on the bound is 128, and
  checked. The device kernel does not have this bound, but XLA runs the one-shot
  kernel wherever the device kernel does not apply.
"""

from __future__ import annotations

import re

import jaxlib.version
import numpy as np

from ep._src.base import xla_flags

# For each flag: the value that `note` suggests, and all values that XLA takes.
# XLA reads a flag without a value as true, and ignores case.
_FLAGS = {
  "--xla_gpu_experimental_ragged_all_to_all_use_device_kernel": (
    "true",
    {"", "1", "true"},
  ),
  "--xla_enable_nccl_symmetric_buffers_for_collectives": (
    "raggedalltoall",
    {"raggedalltoall"},
  ),
}


def note(domains: np.ndarray) -> str:
  """Returns a sentence about the device kernel for EP domains of NVIDIA GPUs.

  Args:
    domains: the devices of each domain, [num_domains, P].

  Returns:
    The sentence; "" for other devices, and for domains of one device.
  """
  first = domains.flat[0]
  is_nvidia = getattr(first, "compute_capability", "")[:1].isdigit()
  P = domains.shape[1]
  if not is_nvidia or P == 1:
    return ""
  num_processes = max(len({d.process_index for d in row}) for row in domains)
  needed = (0, 12, 0) if P > 32 else (0, 11, 1 if num_processes == 1 else 2)
  installed = jaxlib.version.__version__
  missing = _missing()
  text = "XLA's device kernel for ragged all-to-alls is "
  text += "off" if missing else "on"
  if tuple(map(int, re.findall(r"\d+", installed)[:3])) < needed:
    return (
      f"{text}; for {P} ranks of {num_processes} processes it needs jaxlib"
      f" {'.'.join(map(str, needed))}, and this is {installed}."
    )
  if missing:
    return f"{text}; to turn it on, add to XLA_FLAGS: {' '.join(missing)}"
  return f"{text}."


def _missing() -> list[str]:
  """Returns the flags that XLA_FLAGS lacks for the device kernel."""
  found = xla_flags.read()
  missing = []
  for name, (value, accepted) in _FLAGS.items():
    values = found[name].partition("=")[2].lower() if name in found else None
    if values is None or accepted.isdisjoint(values.split(",")):
      missing.append(f"{name}={value}")
  return missing
