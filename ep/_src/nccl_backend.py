# SPDX-License-Identifier: Apache-2.0
"""backend="nccl": NVIDIA GPUs from Hopper on, through NCCL EP."""

from __future__ import annotations

import base64
import collections
import functools
from typing import TYPE_CHECKING

import jax
import numpy as np

from ep._src import compat, ffi, native, nccl_files, rendezvous

if TYPE_CHECKING:
  from ep._src.group import EpGroup

# See backends.py.
FUSES_WEIGHTS = False
ANY_PLACES = False
ONE_CAPACITY = True
close = functools.partial(ffi.close_group, "nccl")
release = functools.partial(ffi.release_group, "nccl")
close_released = functools.partial(ffi.close_released, "nccl")
check = functools.partial(ffi.check_group, "nccl")
memory = functools.partial(ffi.group_memory, "nccl")
mem_bytes = native.mem_bytes
lower = functools.partial(native.lower, around=compat.on_collective_stream)

_MIN_COMPUTE_CAPABILITY = 9.0


def check_mesh(mesh: jax.sharding.Mesh, axis_name: str) -> None:
  what = 'ep_bootstrap: backend = "nccl" '
  for device in mesh.devices.flat:
    if device.platform != "gpu":
      raise rendezvous.CannotServe(
        f"{what}needs a mesh of NVIDIA GPUs, not of {device.platform!r}"
        " devices; use backend=None, which picks by platform."
      )
    # Another vendor's is a name, like "gfx942".
    capability = getattr(device, "compute_capability", "none")
    if _version(capability) < _MIN_COMPUTE_CAPABILITY:
      raise rendezvous.CannotServe(
        f"{what}needs compute capability {_MIN_COMPUTE_CAPABILITY} (Hopper) or"
        f" newer, but {device} ({device.device_kind}) has {capability}."
      )
  if mesh.shape[axis_name] < 2:
    raise rendezvous.CannotServe(
      f"{what}needs at least two ranks in a domain, but mesh axis"
      f" {axis_name!r} has one; give the axis more devices."
    )
  counts = collections.Counter(d.process_index for d in mesh.devices.flat)
  process, count = counts.most_common(1)[0]
  if count > 1:
    raise rendezvous.CannotServe(
      f"{what}needs one process per GPU, but process {process} has {count} GPUs"
      " of the mesh; start a process for each and give it one with"
      " jax.distributed.initialize(local_device_ids=...) or"
      " CUDA_VISIBLE_DEVICES (docs/gpu.md)."
    )


def _version(capability: str) -> float:
  try:
    return float(capability)
  except ValueError:
    return 0.0


def connect(group: EpGroup) -> None:
  me = jax.process_index()
  domains = rendezvous.domains(group.mesh, group.axis_name)
  (domain, rank), *_ = np.argwhere(
    np.vectorize(lambda d: d.process_index == me)(domains)
  )
  device = domains[domain, rank]

  def introduce():
    ffi.library("nccl")  # the others are told if it is not there
    libraries = nccl_files.prepare(device)
    if rank > 0:
      return {}
    return dict(id=base64.b64encode(ffi.new_nccl_id(*libraries)).decode())

  answers = rendezvous.exchange(group, introduce)
  founder = answers[domains[domain, 0].process_index]
  nccl, nccl_ep = nccl_files.prepare(device)
  ffi.create_nccl_group(
    name=group.name,
    config=group.config,
    rank=rank,
    domain=domain,
    device=device.local_hardware_id,
    num_experts=group.num_experts,
    ep_size=group.ep_size,
    max_tokens=group.max_tokens_per_rank,
    capacity=group.recv_capacity_per_rank,
    max_row_bytes=group.hidden_dim * group.max_token_dtype.itemsize,
    max_num_sms=group.max_num_sms,
    timeout_s=group.timeout_s,
    unique_id=base64.b64decode(founder["id"]),
    nccl=nccl,
    nccl_ep=nccl_ep,
  )
