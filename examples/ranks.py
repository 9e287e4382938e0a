# SPDX-License-Identifier: Apache-2.0
"""Holds what both programs need: the flags of a mesh, its ranks, and a text."""

from collections.abc import Callable, Iterator, Sequence
import os
import pathlib
import sys
import sysconfig

from absl import app, flags, logging
import jax
from jax.sharding import AxisType, Mesh
import numpy as np

from ep import launch

AXES = "dp", "ep"  # the mesh axes
VOCABULARY = 256  # a token is a byte

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


def make_mesh() -> Mesh:
  sizes = DP.value, EP.value
  return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 2)


def main(
  argv: Sequence[str],
  program: str,
  check: Callable[[], object],
  run: Callable[[], int | None],
  threads: int,
) -> int | str:
  """Runs a program in the ranks of a launcher, or launches its ranks.

  Args:
    argv: the arguments after the flags, and the program's name.
    program: the file to launch, with the flags of this process.
    check: raises OSError or ValueError if the program cannot run. Without a
      launcher, one process calls it, and reports an error once.
    run: returns the exit code; None means 0.
    threads: threads of XLA on CPU. XLA may split the sum of a matmul into as
      many sums, so the value must not depend on the number of processes or on
      the machine.

  Returns:
    The exit code, or the message of an OSError or ValueError.
  """
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  logging.set_verbosity(logging.ERROR)
  try:
    if launch.inside_launcher():
      _join(threads)
      return run() or 0
    check()
    return launch.launch(
      [program, *sys.argv[1:]],
      num_processes=NUM_PROCESSES.value,
      devices_per_process=num_ranks() // NUM_PROCESSES.value,
      ranks_per_gpu=_RANKS_PER_GPU.value,
    )
  except (OSError, ValueError) as error:
    return f"{pathlib.Path(program).stem}: {error}"


def _join(threads: int) -> None:
  """Joins this process to the other ranks."""
  os.environ["NPROC"] = str(threads)
  # XLA's transport between processes prints on file descriptor 1. Keep these
  # lines out of Python's stdout.
  sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
  with open(os.devnull, "wb") as nowhere:
    os.dup2(nowhere.fileno(), 1)
  launch.initialize(exit_at_once=True)


def here(path: str | os.PathLike) -> pathlib.Path:
  """Resolves a path of the user; `bazel run` changes the working directory."""
  return pathlib.Path(os.environ.get("BUILD_WORKING_DIRECTORY", ""), path)


def read_text(limit: int, least: int) -> np.ndarray:
  """Returns the first bytes of --text; of a folder, in order of file names.

  Skips files with a zero byte, which are not text, and broken links.

  Args:
    limit: the largest number of bytes.
    least: the smallest number of bytes.

  Returns:
    int32 `[N]`, from 0 to 255.

  Raises:
    ValueError: the text has less than `least` bytes.
  """
  path = here(_TEXT.value or sysconfig.get_path("stdlib"))
  text = bytearray()
  for file in _files(path):
    content = file.read_bytes()
    if b"\0" not in content:
      text += content
    if len(text) >= limit:
      break
  if len(text) < least:
    raise ValueError(
      f"{path} has {len(text)} bytes of text, but the program needs {least};"
      " name another file or folder with --text."
    )
  return np.frombuffer(text, np.uint8)[:limit].astype(np.int32)


def _files(path: pathlib.Path) -> Iterator[pathlib.Path]:
  if path.is_file():
    yield path
  for folder, folders, names in os.walk(path):
    folders.sort()
    files = (pathlib.Path(folder, name) for name in sorted(names))
    yield from filter(pathlib.Path.is_file, files)
