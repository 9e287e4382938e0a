# SPDX-License-Identifier: Apache-2.0
"""The measured ops, which run a contender on one rank's arrays."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from benchmarks.workload import SPEC


@dataclasses.dataclass(frozen=True)
class Op:
  """A measured op.

  Attributes:
    run: a function of a contender and the inputs.
    inputs: names in `Workload.inputs`; "handle" is the result of the
      contender's prepare.
  """

  run: Callable[..., Any]
  inputs: tuple[str, ...]


def _method(name: str, *inputs: str) -> Op:
  """Returns the op that calls the contender's method of this name."""

  def run(contender, *args):
    return getattr(contender, name)(*args)

  return Op(run, inputs)


def _round_trip(contender, handle, tokens, topk_weights):
  rows, row_weights = contender.dispatch(handle, tokens, topk_weights)
  return contender.combine(handle, _experts(rows, topk_weights), row_weights)


def _experts(rows, weights):
  """Returns the rows unchanged, and makes XLA write them to memory.

  Without experts, XLA fuses the two gathers of a hand-written round trip, even
  through an optimization barrier, and never writes the received rows. A loop of
  0 rounds over the buffer makes XLA write them.
  """
  rounds = jnp.isnan(weights[0, 0]).astype(jnp.int32)  # always 0
  return lax.fori_loop(0, rounds, lambda i, rows: rows.at[i].mul(2), rows)


def _moe_grad(contender, topk_idx, *differentiated):
  _, vjp = jax.vjp(functools.partial(contender.moe, topk_idx), *differentiated)
  tokens, *_ = differentiated
  return vjp(tokens)  # the tokens are also the cotangent


# The round trip is a MoE layer without experts: combine multiplies the rows by
# the weights from dispatch.
OPS = {
  "prepare": _method("prepare", "topk_idx"),
  "dispatch": _method("dispatch", "handle", "tokens", "topk_weights"),
  "combine": _method("combine", "handle", "rows"),
  "dispatch_bwd": _method("dispatch_bwd", "handle", "rows", "row_weights"),
  "combine_bwd": _method("combine_bwd", "handle", "tokens"),
  "round_trip": Op(_round_trip, ("handle", "tokens", "topk_weights")),
}

# A whole layer with experts down(silu(gate(x)) * up(x)): the forward pass, and
# the forward pass with all gradients.
_MOE_INPUTS = (
  "topk_idx",
  "tokens",
  "topk_weights",
  "w_gate",
  "w_up",
  "w_down",
)
LAYERS = {
  "moe": _method("moe", *_MOE_INPUTS),
  "moe_grad": Op(_moe_grad, _MOE_INPUTS),
}

ALL = ChainMap(LAYERS, OPS)  # iterates over OPS first


def program(op: str, contender, mesh):
  """Returns the jitted program of an op, a function of its global inputs."""
  return jax.jit(
    jax.shard_map(
      functools.partial(ALL[op].run, contender),
      mesh=mesh,
      in_specs=SPEC,
      out_specs=SPEC,
      check_vma=False,
    )
  )


def compile_op(op: str, contender, mesh, inputs):
  """Returns the compiled program of an op, and its arguments.

  A first call compiles the program, because JAX takes longer to call programs
  that were compiled ahead of time.
  """
  args = [inputs[name] for name in ALL[op].inputs]
  run = program(op, contender, mesh)
  jax.block_until_ready(run(*args))
  return run, args


def with_handle(contender, mesh, inputs, ops):
  """Returns the inputs, plus the contender's handle if an op takes one."""
  if not any("handle" in ALL[op].inputs for op in ops):
    return inputs
  prepare, args = compile_op("prepare", contender, mesh, inputs)
  return {**inputs, "handle": prepare(*args)}
