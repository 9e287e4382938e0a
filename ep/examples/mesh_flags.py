# SPDX-License-Identifier: Apache-2.0
"""The flags of a (dp, ep) mesh and its experts, which the examples share.

They are checked against each other when they are parsed.
"""

import sys

from absl import flags
import jax
from jax.sharding import AxisType, Mesh

from ep import launch

DP = flags.DEFINE_integer("dp", 2, "data-parallel size of the mesh", 1)
EP = flags.DEFINE_integer("ep", 2, "expert-parallel size of the mesh", 1)
NUM_PROCESSES = flags.DEFINE_integer(
  "num_processes", 4, "worker processes; each holds dp * ep / this devices", 1
)
NUM_EXPERTS = flags.DEFINE_integer("num_experts", 8, "experts of a layer", 1)
TOP_K = flags.DEFINE_integer("top_k", 2, "experts of a token", 1)


@flags.multi_flags_validator(
  ["dp", "ep", "num_processes"],
  message="num_processes must divide dp * ep: all hold as many ranks",
)
def _processes_divide_ranks(values) -> bool:
  return values["dp"] * values["ep"] % values["num_processes"] == 0


@flags.multi_flags_validator(
  ["num_experts", "ep"], message="num_experts must be a multiple of ep"
)
def _ranks_divide_experts(values) -> bool:
  return values["num_experts"] % values["ep"] == 0


@flags.multi_flags_validator(
  ["num_experts", "top_k"], message="top_k must not exceed num_experts"
)
def _experts_suffice(values) -> bool:
  return values["top_k"] <= values["num_experts"]


def num_ranks() -> int:
  return DP.value * EP.value


def make_mesh() -> Mesh:
  """Returns the mesh, whose axes are named like their flags."""
  return jax.make_mesh(
    (DP.value, EP.value), ("dp", "ep"), axis_types=(AxisType.Auto,) * 2
  )


def launch_ranks(program: str, **options) -> int:
  """Runs a program's ranks, with the flags of this process.

  Args:
    program: its file.
    **options: of `launch.launch`.

  Returns:
    The exit code.
  """
  return launch.launch(
    [program, *sys.argv[1:]],
    num_processes=NUM_PROCESSES.value,
    devices_per_process=num_ranks() // NUM_PROCESSES.value,
    **options,
  )
