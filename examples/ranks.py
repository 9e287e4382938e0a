# SPDX-License-Identifier: Apache-2.0
"""Defines the flags of a (dp, ep) mesh, and starts its ranks."""

from collections.abc import Callable
import os
import pathlib
import sys
from typing import Any

from absl import flags
import jax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh

from ep import launch
import text

AXES = "dp", "ep"  # the mesh axes

DP = flags.DEFINE_integer("dp", 2, "data-parallel size of the mesh", 1)
EP = flags.DEFINE_integer("ep", 2, "expert-parallel size of the mesh", 1)
NUM_PROCESSES = flags.DEFINE_integer(
  "num_processes", 4, "processes; dp * ep devices are split over them", 1
)
_RANKS_PER_GPU = flags.DEFINE_integer(
  "ranks_per_gpu", 1, "processes that share a GPU, with JAX_PLATFORMS=cuda", 1
)
NUM_EXPERTS = flags.DEFINE_integer("num_experts", 8, "experts of a layer", 1)
TOP_K = flags.DEFINE_integer("top_k", 2, "experts of a token", 1)
BACKEND = flags.DEFINE_string(
  "backend", None, "ep backend; default: by platform"
)
_TEXT = flags.DEFINE_string(
  "text", None, "file or folder; default: Python's standard library"
)


def require(names: str, message: str, holds: Callable[..., bool]) -> None:
  """Makes the parser check flags; spaces separate the names of the flags."""
  flags.register_multi_flags_validator(
    names.split(), lambda values: holds(*values.values()), message
  )


require(
  "dp ep num_processes",
  "num_processes must divide dp * ep: all hold as many ranks",
  lambda dp, ep, processes: dp * ep % processes == 0,
)
require(
  "num_experts top_k",
  "top_k must not exceed num_experts",
  lambda experts, top_k: top_k <= experts,
)


def num_ranks() -> int:
  return DP.value * EP.value


def make_mesh(dp: int | None = None, ep: int | None = None) -> Mesh:
  """Returns a (dp, ep) mesh; by default, flags give the sizes.

  If the launcher has started the program again without lost ranks, all devices
  are on the axis "ep".
  """
  sizes = dp or DP.value, ep or EP.value
  if not dp and num_ranks() != jax.device_count() and restarts():
    sizes = 1, jax.device_count()
  return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 2)


def restarts() -> int:
  """Returns how often the launcher has started the program again."""
  return int(os.environ.get("EP_LAUNCH_RESTART", "0"))


def launch_ranks(program: str, **options: Any) -> int:
  """Runs the ranks of a program file with the flags of this process.

  Args:
    options: further options of `ep.launch.launch`.

  Returns:
    The exit code.
  """
  return launch.launch(
    [program, *sys.argv[1:]],
    num_processes=NUM_PROCESSES.value,
    devices_per_process=num_ranks() // NUM_PROCESSES.value,
    ranks_per_gpu=_RANKS_PER_GPU.value,
    **options,
  )


def initialize(threads: int) -> None:
  """Joins this process to the other ranks.

  Args:
    threads: threads of XLA on CPU. XLA may split the sum of a matmul into as
      many sums, so the value must not depend on the number of processes or on
      the machine.
  """
  os.environ["NPROC"] = str(threads)
  # XLA's transport between processes prints on file descriptor 1. Keep these
  # lines out of Python's stdout.
  sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
  with open(os.devnull, "wb") as nowhere:
    os.dup2(nowhere.fileno(), 1)
  launch.initialize()


def preempted(step: int) -> bool:
  """Returns whether a rank got SIGTERM, and all ranks stop after this step."""
  return (
    jax.process_count() > 1
    and jax.config.values["jax_enable_preemption_service"]
    and multihost_utils.reached_preemption_sync_point(step)
  )


def text_path() -> pathlib.Path:
  return here(_TEXT.value or text.standard_library())


def here(path: str | os.PathLike) -> pathlib.Path:
  """Resolves a path of the user; `bazel run` changes the working directory."""
  return pathlib.Path(os.environ.get("BUILD_WORKING_DIRECTORY", ""), path)
