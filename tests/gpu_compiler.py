# SPDX-License-Identifier: Apache-2.0
"""Compiles programs for GPUs on a machine without one.

JAX's CUDA plugin has XLA's compiler. It needs the description of a GPU, and
FFI handlers, which nothing calls.
"""

import dataclasses
import itertools
import math
import pathlib
import re
from typing import Any

import jax
from jax.sharding import Mesh
import numpy as np
import pytest

from ep._src.base.backend import OPS
from ep._src.native import ffi
import targets

needs_compiler = pytest.mark.skipif(
  not targets.has_compiler("h100x4"),
  reason="this needs JAX's CUDA plugin, but no GPU",
)


@dataclasses.dataclass
class Thunk:
  """An operation of a compiled program, which XLA enqueues on a GPU stream.

  Attributes:
    kind: XLA's name of the kind, as "kAllReduce".
    name: the HLO instruction.
    stream: "" is the stream of the program.
    beside: the operations that XLA enqueues on the stream of the program before
      that stream waits for this operation, if this one is on another stream.
  """

  kind: str
  name: str
  stream: str = ""
  beside: list["Thunk"] = dataclasses.field(default_factory=list)


NOTHING = "nothing"  # the kind of a placeholder in an empty start-done pair
_CONTROL = "kCommandBuffer", "kSequential", "kWhile", "kConditional"


def compile_for_h100(
  exported: jax.export.Exported,
  mesh: Mesh,
  folder: pathlib.Path,
  **options: Any,
) -> list[Thunk]:
  """Compiles for an H100 per device of `mesh`; returns thunks in XLA's order.

  XLA gets `options`, and dumps the program to `folder`.
  """
  library = ffi.library("host")
  for op in OPS:
    handler = jax.ffi.pycapsule(getattr(library, op))
    jax.ffi.register_ffi_target(op, handler, platform="CUDA")
  h100 = np.array(targets.gpus(*targets.H100, mesh.size))
  gpus = Mesh(h100.reshape(mesh.devices.shape), mesh.axis_names)
  args = [
    jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    for x, sharding in zip(
      exported.in_avals, exported.in_shardings_jax(gpus), strict=True
    )
  ]
  args, kwargs = jax.tree.unflatten(exported.in_tree, args)
  outs = jax.tree.unflatten(exported.out_tree, exported.out_shardings_jax(gpus))
  program = jax.jit(exported.call, out_shardings=outs)
  options["xla_dump_to"] = str(folder)
  program.lower(*args, **kwargs).compile(options)
  (sequence,) = folder.glob("*thunk_sequence_after_thunk_passes.txt")
  (names,) = folder.glob("*thunk_metadata.txt")
  return _read(sequence.read_text(), names.read_text())


def _read(sequence: str, metadata: str) -> list[Thunk]:
  names = {}
  for text in metadata.split("thunk_metadata {"):
    number = re.search(r"thunk_id: (\d+)", text)
    name = re.search(r'profile_annotation: "(.*)"', text)
    if number and name:
      names[number[1]] = name[1]
  line = (
    r"^( *)(?:0*(\d+): (k\w+)|No thunks)"
    r"(?:.* stream=([\w[\]]+))?(?:.* async_id=(\d+))?"
  )
  thunks = []
  running = {}  # the thunks of each start-done pair that has no done yet
  pair, stream, depth = "", "", math.inf  # of the last kAsyncStart
  for indent, number, kind, *start in re.findall(line, sequence, re.MULTILINE):
    if len(indent) <= depth:
      depth = math.inf
    if kind == "kAsyncStart":
      (stream, pair), depth = start, len(indent)
      running[pair] = []
    elif kind == "kAsyncDone":
      del running[start[1]]
    elif kind not in _CONTROL:
      thunk = Thunk(kind or NOTHING, names.get(number, ""))
      thunks.append(thunk)
      if depth < len(indent):
        thunk.stream = stream
        running[pair].append(thunk)
      else:
        for other in itertools.chain(*running.values()):
          other.beside.append(thunk)
  return thunks
