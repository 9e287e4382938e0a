# SPDX-License-Identifier: Apache-2.0
"""Meshes of accelerators that this machine need not have.

XLA compiles for them ahead of time. TPUs need libtpu (`pip install jax[tpu]`);
GPUs need JAX's CUDA plugin.
"""

from __future__ import annotations

import importlib.util
import os

import jax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh
import numpy as np

# Topologies of four chips. A chip of tpu7x is two devices.
_TPUS = {
  "v5e": "v5e:2x2",
  "v5p": "v5p:2x2x1",
  "v6e": "v6e:2x2",
  "tpu7x": "tpu7x:2x2x1",
}

# Name, cores and compute capability.
H100 = "NVIDIA H100 80GB HBM3", 132, "9.0"
_GPUS = {"h100": H100, "b200": ("NVIDIA B200", 148, "10.0")}
TPUS = (*_TPUS,)
GPUS = tuple(f"{gpu}x{n}" for gpu in _GPUS for n in (4, 8))

# Describes a GPU to XLA, with the sizes of an H100.
_GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84929806336
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 2 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{name}"
"""


def has_compiler(target: str) -> bool:
  """Returns whether a package with XLA's compiler for a target is installed."""
  gpu_plugins = "jax_cuda12_plugin", "jax_cuda13_plugin"
  packages = ("libtpu",) if target in TPUS else gpu_plugins
  return any(map(importlib.util.find_spec, packages))


def mesh(target: str) -> Mesh:
  """Returns a mesh with the axis "ep", of all devices of a target."""
  if target in TPUS:
    devices = _tpus(target)
  else:
    gpu, _, count = target.partition("x")
    devices = gpus(*_GPUS[gpu], int(count))
  return Mesh(np.array(devices), ("ep",), axis_types=(AxisType.Auto,))


def _tpus(target: str) -> list[jax.Device]:
  # Otherwise libtpu looks for TPUs of this machine, and refuses to be loaded by
  # two processes. It compiles for all kinds, whatever type is set here.
  os.environ |= {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
  }
  return topologies.get_topology_desc(_TPUS[target], "tpu").devices


def gpus(
  name: str, cores: int, capability: str, count: int = 1
) -> list[jax.Device]:
  """Describes `count` GPUs of one host to XLA.

  jaxlib compiles only for the first kind of GPU that a process describes.
  """
  major, minor = capability.split(".")
  target = _GPU.format(name=name, cores=cores, major=major, minor=minor)
  topology = topologies.get_topology_desc(
    name, "cuda", topology=f"1x1x{count}", target_config=target
  )
  return topology.devices
