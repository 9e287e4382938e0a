# SPDX-License-Identifier: Apache-2.0
"""Creates JAX primitives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ep._src.base import compat


def new(
  name: str,
  types: Callable[..., Sequence[Any]],
  lower: Callable[..., Any],
  *,
  static: Sequence[str] = (),
  cacheable: bool = True,
  **by_platform: Callable[..., Any],
) -> compat.Primitive:
  """Creates a JAX primitive that returns a list and has no derivative.

  `vmap` binds the primitive for one example after another, unless the caller
  registers another batching rule.

  Args:
    name: the name of the primitive in programs.
    types: returns the abstract values of the results for the abstract values
      of the operands and the parameters.
    lower: the lowering.
    static: the names of the parameters. Eager calls then compile once for each
      set of abstract values and parameters, also under `jax.disable_jit`.
    cacheable: whether JAX may lower equal calls of a program only once. False
      if each call is lowered with a serial number.
    **by_platform: other lowerings for the platforms "cpu", "cuda", "tpu".
  """
  primitive = compat.Primitive(name)
  primitive.multiple_results = True
  primitive.def_abstract_eval(types)
  for platform, rule in [(None, lower), *by_platform.items()]:
    compat.mlir.register_lowering(
      primitive, rule, platform, cacheable=cacheable
    )
  if static:
    program = jax.jit(primitive.bind, static_argnames=static)

    def run(*operands: Any, **params: Any) -> Any:
      with jax.disable_jit(False):
        return program(*operands, **params)

    primitive.def_impl(run)

  def batch(args: Any, dims: Any, **params: Any) -> Any:
    batched = [
      None if d is None else jnp.moveaxis(x, d, 0)
      for x, d in zip(args, dims, strict=True)
    ]

    def one(example: Any) -> Any:
      pairs = zip(args, example, strict=True)
      operands = [whole if x is None else x for whole, x in pairs]
      return primitive.bind(*operands, **params)

    outs = jax.lax.map(one, batched)
    return outs, [0] * len(outs)

  compat.batching.primitive_batchers[primitive] = batch
  return primitive


def batch_elementwise(primitive: compat.Primitive) -> None:
  """Makes `vmap` bind a one-operand primitive once, with the whole batch."""

  def batch(args: Any, dims: Any, **params: Any) -> Any:
    return primitive.bind(*args, **params), dims

  compat.batching.primitive_batchers[primitive] = batch
