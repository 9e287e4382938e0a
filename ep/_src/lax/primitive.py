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
  on_cpu: Callable[..., Any] | None = None,
  on_cuda: Callable[..., Any] | None = None,
  on_tpu: Callable[..., Any] | None = None,
  static: Sequence[str] = (),
  cacheable: bool = True,
) -> compat.Primitive:
  """Creates a JAX primitive that returns a list and has no derivative.

  `vmap` binds the primitive for one example after another, unless the caller
  registers another batching rule.

  Args:
    name: the name of the primitive in programs.
    types: returns the abstract values of the results for the abstract values
      of the operands and the parameters.
    lower: the lowering.
    on_cpu: another lowering for CPUs.
    on_cuda: another lowering for NVIDIA GPUs.
    on_tpu: another lowering for TPUs.
    static: the names of the parameters. Eager calls then compile once for each
      set of abstract values and parameters, also under `jax.disable_jit`.
    cacheable: whether JAX may lower equal calls of a program only once. False
      if each call is lowered with a serial number.
  """
  primitive = compat.Primitive(name)
  primitive.multiple_results = True
  primitive.def_abstract_eval(types)
  compat.mlir.register_lowering(primitive, lower, cacheable=cacheable)
  rules = ("cpu", on_cpu), ("cuda", on_cuda), ("tpu", on_tpu)
  for platform, rule in rules:
    if rule is not None:
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
    is_batched = [d is not None for d in dims]
    batched = [
      jnp.moveaxis(x, d, 0)
      for x, d in zip(args, dims, strict=True)
      if d is not None
    ]

    def one(examples: Any) -> Any:
      examples = iter(examples)
      operands = [
        next(examples) if b else x
        for x, b in zip(args, is_batched, strict=True)
      ]
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
