# SPDX-License-Identifier: Apache-2.0
"""Which GPU each rank of this host gets: one of its own, unless told to share.

Imports no JAX: the launcher must not hold what its ranks want.
"""

from __future__ import annotations

from collections.abc import Mapping
import importlib.metadata
import importlib.util
import os
import pkgutil
import subprocess

# What XLA takes of a GPU's memory, and JAX's default of it.
_MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_MEMORY_FRACTION = 0.75

# NCCL has no more than so many ranks on a GPU as long as each takes as many
# thread blocks as it likes; beyond that they might wait for one another's.
_RANKS_AS_NCCL_LIKES = 2
_MAX_BLOCKS = "NCCL_MAX_CTAS"
_BLOCKS_OF_A_GPU = 16


def wanted(environment: Mapping[str, str]) -> bool:
  """Returns whether the environment tells JAX to run on GPUs."""
  platforms = environment.get("JAX_PLATFORMS", "").split(",")
  return not {"cuda", "gpu"}.isdisjoint(platforms)


def check_plugin() -> None:
  """Raises if JAX is to run on GPUs and has no plugin for any platform.

  JAX itself would end in an AssertionError without words where it sees no GPU,
  and say that "cuda" is unknown where it does.
  """
  if not wanted(os.environ) or "PJRT_NAMES_AND_LIBRARY_PATHS" in os.environ:
    return
  spec = importlib.util.find_spec("jax_plugins")
  places = (spec and spec.submodule_search_locations) or ()
  if any(pkgutil.iter_modules(places)):
    return
  if not importlib.metadata.entry_points(group="jax_plugins"):
    raise RuntimeError(
      f"JAX_PLATFORMS={os.environ['JAX_PLATFORMS']} wants GPUs, but this"
      ' Python has no CUDA plugin of JAX. Install it, pip install "jax[cuda13]"'
      ' or "jax[cuda12]"; a Bazel target depends on //third_party/py:jax_gpu'
      " of jax_ep and is built with --config=cuda13 or --config=cuda12."
    )


def visible() -> list[str]:
  """The GPUs of this host that a process would see, as CUDA names them."""
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
  """What each of `num_ranks` ranks has in its environment.

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
    # NCCL 2.30 and newer; the others refuse.
    shared["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    if ranks_per_gpu > _RANKS_AS_NCCL_LIKES and _MAX_BLOCKS not in os.environ:
      shared[_MAX_BLOCKS] = str(max(1, _BLOCKS_OF_A_GPU // ranks_per_gpu))
    if _MEMORY not in os.environ:
      shared[_MEMORY] = f"{_MEMORY_FRACTION / ranks_per_gpu:.3f}"
  return [
    shared | {"CUDA_VISIBLE_DEVICES": gpus[rank // ranks_per_gpu]}
    for rank in range(num_ranks)
  ]
