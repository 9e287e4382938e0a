# SPDX-License-Identifier: Apache-2.0
"""Measures ops with each wire beside those without, in turns.

    bazel run //benchmarks:wires -- --shapes=1024x1024x2x16

Dispatch and the backward pass of combine travel as the wire says, and the time
of a wire includes that of its quantizers. Tokens are bfloat16, the routing is
uniform, and the tail is unspecified.
"""

from __future__ import annotations

import functools

from absl import flags
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
import numpy as np

from benchmarks import contenders, driver, ops, timing, workload
import ep
from ep._src.base.config import WIRES

_SHAPES = flags.DEFINE_list(
  "shapes", ["1024x1024x2x16", "1024x2048x8x64"], "TxHxKxE"
)
_OPS = "round_trip", "combine_bwd"


def main() -> None:
  ranks = jax.device_count()
  mesh = jax.make_mesh((ranks,), (workload.AXIS,), axis_types=(AxisType.Auto,))
  for shape in workload.parse_shapes(_SHAPES.value, tokens=1, scale=1):
    choices = workload.draw("uniform", shape, ranks)
    layout = workload.make_layout(
      shape, choices, ranks, capacity_factor=None, zero_tail=False
    )
    work = workload.Workload(layout, choices, jnp.dtype("bfloat16"))
    inputs = work.inputs(mesh, ("topk_idx", "tokens", "topk_weights"))
    with ep.ep_bootstrap(
      mesh,
      num_experts=shape.num_experts,
      max_tokens_per_rank=shape.tokens,
      hidden_dim=shape.hidden,
      top_k=shape.top_k,
      max_token_dtype=work.dtype,
    ) as group:
      runs = {}
      for wire in WIRES:
        layer = ep.EpLayerConfig(group, tail="unspecified", wire=wire)
        contender = contenders.Ep(layer, layout)
        with_handle = ops.with_handle(contender, mesh, inputs, _OPS)
        for op in _OPS:
          program, args = ops.compile_op(op, contender, mesh, with_handle)
          runs[op, wire] = functools.partial(_run, program, args)
      times = timing.take_turns(
        runs,
        mesh,
        rounds=driver.ROUNDS.value,
        warmup=2,
        clock=driver.CLOCK.value,
      )
    if jax.process_index() == 0:
      for (op, wire), seconds in times.items():
        ratio = np.median(seconds / times[op, None])
        median = np.median(seconds) * 1e3
        print(f"{shape} {op:16} {wire!s:13} {median:.2f} ms, {ratio:.2f} x")


def _run(program, args):
  return jax.block_until_ready(program(*args))


if __name__ == "__main__":
  driver.run(main)
