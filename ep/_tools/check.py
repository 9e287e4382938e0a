# SPDX-License-Identifier: Apache-2.0
"""Raises the fault that a program of backend "xla" returned."""

from __future__ import annotations

import jax

from ep._src.base import arguments, errors
from ep._src.moe.losses import Metrics
from ep._src.ops.handle import EpHandle


def check(result: EpHandle | Metrics) -> None:
  """Raises the fault of `ep_prepare` that a handle or metrics carry.

  With `ep_bootstrap(errors="flag")`, which is the default of "xla" on TPUs and
  GPUs, programs return the faults of a routing: an id out of range or repeated,
  more rows than the capacity, ranks that disagree. A loop that never calls
  `check` trains on NaN:

      params, metrics = step(params, batch)
      if i % 100 == 0:
        ep.check(metrics)

  Waits for the program. Not collective: each process of a domain with a fault
  raises, and with metrics each process of the mesh. Of a handle on "nccl", it
  raises that the routing failed, and `EpGroup.raise_failures` says why.

  Args:
    result: a handle, or metrics. The metrics may be of several layers, stacked
      along leading axes.

  Raises:
    ValueError: the error that `errors="raise"` would raise; of metrics, the
      error of the first layer with one.
    TypeError: `result` is neither, or is traced.
  """
  if isinstance(result, Metrics):
    errors.raise_carried(_known(result.fault))
    return
  if not isinstance(result, EpHandle):
    expected = "an EpHandle or an ep.moe.Metrics"
    raise arguments.wrong_type("check", "result", result, expected)
  if result.layer.group.connection.flags:
    errors.raise_carried(_known(result.mem))
    return
  for shard in _known(result.total_recv_tokens).addressable_shards:
    arguments.check(
      (shard.data >= 0).all(),
      f'ep_prepare(layer "{result.layer.name}")',
      "the routing failed; EpGroup.raise_failures says why.",
    )


def _known(array: jax.Array) -> jax.Array:
  """Returns the array, or raises `TypeError` if it is traced."""
  if isinstance(array, jax.core.Tracer):
    raise TypeError(
      "check: the result is traced, so it has no value yet; return it from the"
      " program, and check it outside."
    )
  return array
