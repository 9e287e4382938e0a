# SPDX-License-Identifier: Apache-2.0
"""Assigns each rank of this host a GPU, or a share of one.

This module does not import JAX, because the launcher must not occupy devices.
"""

from __future__ import annotations

from collections.abc import Mapping
import importlib.metadata
import importlib.util
import os
import subprocess

# The variable with the fraction of GPU memory that XLA reserves; its default.
_MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_MEMORY_FRACTION = 0.75

# NCCL allows at most this number of ranks on a GPU if the thread blocks of each
# rank are not limited, because blocks of one rank might wait for blocks of
# another rank that the GPU cannot schedule.
_RANKS_WITHOUT_LIMIT = 2
_MAX_BLOCKS = "NCCL_MAX_CTAS"
_BLOCKS_OF_A_GPU = 16


def wanted(environment: Mapping[str, str]) -> bool:
  """Returns whether the environment tells JAX to run on GPUs."""
  platforms = environment.get("JAX_PLATFORMS", "").split(",")
  return not {"cuda", "gpu"}.isdisjoint(platforms)


def check_plugin() -> None:
  """Raises `RuntimeError` if JAX must run on GPUs but has no plugin.

  Workaround (seen in jax 0.12.0): JAX would raise an AssertionError without a
  message, or say that "cuda" is unknown.
  """
  if not wanted(os.environ) or "PJRT_NAMES_AND_LIBRARY_PATHS" in os.environ:
    return
  has_modules = importlib.util.find_spec("jax_plugins")
  if not has_modules and not importlib.metadata.entry_points(
    group="jax_plugins"
  ):
    raise RuntimeError(
      f"JAX_PLATFORMS={os.environ['JAX_PLATFORMS']} wants GPUs, but this"
      ' Python has no CUDA plugin of JAX. Install it, pip install "jax[cuda13]"'
      ' or "jax[cuda12]"; a Bazel target depends on //third_party/py:jax_gpu'
      " of jax_ep and is built with --config=cuda13 or --config=cuda12."
    )


def visible() -> list[str]:
  """Returns the GPUs in CUDA_VISIBLE_DEVICES, or else all GPUs' indices."""
  chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
  if chosen is not None:
    return [name.strip() for name in chosen.split(",") if name.strip()]
  try:
    listing = subprocess.run(
      ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True
    )
  except (OSError, subprocess.CalledProcessError):
    return []
  lines = [line for line in listing.stdout.splitlines() if line.strip()]
  return [str(i) for i in range(len(lines))]


def rank_variables(
  num_ranks: int, ranks_per_gpu: int
) -> list[Mapping[str, str]]:
  """Returns the environment variables of each rank.

  Raises:
    ValueError: there are too few GPUs.
  """
  gpus = visible()
  needed = -(-num_ranks // ranks_per_gpu)
  if len(gpus) < needed:
    raise ValueError(
      f"{num_ranks} ranks need {needed} GPUs, {ranks_per_gpu} for each, but"
      f" {len(gpus)} are visible; run fewer ranks, or let them share with"
      f" --ranks_per_gpu={num_ranks}."
    )
  shared = {}
  if ranks_per_gpu > 1:
    # NCCL before 2.30 ignores this variable, and refuses to share a GPU.
    shared["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    if ranks_per_gpu > _RANKS_WITHOUT_LIMIT and _MAX_BLOCKS not in os.environ:
      shared[_MAX_BLOCKS] = str(max(1, _BLOCKS_OF_A_GPU // ranks_per_gpu))
    if _MEMORY not in os.environ:
      shared[_MEMORY] = f"{_MEMORY_FRACTION / ranks_per_gpu:.3f}"
  return [
    shared | {"CUDA_VISIBLE_DEVICES": gpus[rank // ranks_per_gpu]}
    for rank in range(num_ranks)
  ]
