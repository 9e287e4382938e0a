# SPDX-License-Identifier: Apache-2.0
"""Our ops, and a layer of the benchmarks, as subjects of `ep.testing`."""

import math

import jax
from jax.sharding import PartitionSpec
import numpy as np

from benchmarks import layers
from benchmarks.workload import Layout, Shape
import ep
from ep.testing import Layer, Received, Tolerance, Transport

TIMEOUT_S = 20.0
DTYPES = ("float32", "bfloat16", "float16")
INNER = 4  # Inner size of an expert.
COUNTS = (
  "token_counts",
  "dropped_counts",
  "total_recv_tokens",
  "max_recv_tokens",
)
DERIVATIVES = dict(gradients=True, second_order=True, jvp=True)


def _build(setting, transport, backend, leading_dims):
  """Builds our ops as `transport` declares them."""
  sizes = dict(max_tokens_per_rank=setting.tokens, hidden_dim=setting.hidden)
  group = ep.ep_bootstrap(
    setting.mesh,
    num_experts=setting.num_experts,
    top_k=setting.top_k,
    recv_capacity_per_rank=setting.capacity,
    alignment=setting.alignment,
    max_token_dtype=setting.dtype,
    overflow=transport.overflow,
    drop_by=transport.drop_by,
    timeout_s=TIMEOUT_S,
    backend=backend,
    **sizes if backend == "nccl" else {},
  )
  layer = ep.EpLayerConfig(group, tail=transport.tail)
  is_global = transport.view == "global"
  inner = math.gcd(setting.tokens, 12)  # the second of two leading dims

  def led(x):
    return x.reshape(-1, inner, x.shape[1]) if leading_dims else x

  def flat(x):
    return x.reshape(-1, *x.shape[2:]) if is_global else x

  def dispatch(tokens, topk_idx, topk_weights, *scales):
    tokens, ids, weights, *scales = map(
      led, (tokens, topk_idx, topk_weights, *scales)
    )
    handle = ep.ep_prepare(layer, ids, weights)
    received = ep.ep_dispatch(
      handle, tokens, weights, scales=scales[0] if scales else None
    )
    rows, row_weights, *row_scales = map(flat, received)
    counts = {name: flat(getattr(handle, name)) for name in COUNTS}
    return Received(
      rows,
      row_weights,
      flat(handle.group_sizes),
      handle,
      row_scales[0] if row_scales else None,
      counts | dict(kept=handle.kept.reshape(topk_idx.shape)),
    )

  def combine(rows, handle, *weights):
    if is_global:
      shape = setting.ep_size, setting.capacity
      rows = rows.reshape(*shape, setting.hidden)
      weights = [x.reshape(shape) for x in weights]
    return ep.ep_combine(handle, rows, *weights).reshape(-1, setting.hidden)

  return dispatch, combine


def _has_aligned_slabs(setting):
  """Returns whether the capacity suffices for one block per expert."""
  return setting.capacity >= setting.alignment * setting.num_local_experts


def _fits_nccl(setting):
  """Returns whether the drawn sizes are within the limits of docs/gpu.md."""
  return (
    _has_aligned_slabs(setting)
    and setting.hidden % 8 == 0
    and setting.num_experts % 4 == 0
    and setting.tokens <= 8192
    and setting.capacity >= -(-setting.tokens // 4) * 4
  )


_OF_NCCL = dict(
  supports=_fits_nccl, tolerance=Tolerance(1), special_values=False
)


def ours(backend, *, leading_dims=False, **declared):
  """Returns our ops on a backend, with any properties of a `Transport`."""
  properties = dict(
    name=f"ep, backend {backend}",
    supports=_has_aligned_slabs,
    dtypes=DTYPES,
    **DERIVATIVES,
    tail="zero",
    alignments=(1, 4, 16),
    overflow="drop",
    special_values=True,
    scales=True,
  )
  properties |= _OF_NCCL if backend == "nccl" else {}
  properties |= declared
  transport = Transport(
    build=lambda setting: _build(setting, transport, backend, leading_dims),
    **properties,
  )
  return transport


HOST = ours("host")
XLA = ours(
  "xla",
  dtypes=("float32", "bfloat16"),
  alignments=(1, 16),
  overflow="error",
)
NCCL = ours("nccl")


def _layout(setting):
  """Returns the layout of a contender with capacity for every routing."""
  shape = Shape(
    setting.tokens, setting.hidden, setting.top_k, setting.num_experts, INNER
  )
  return Layout(
    shape,
    ranks=setting.ep_size,
    capacity=setting.capacity,
    pair_rows=setting.capacity // setting.ep_size,
    expert_rows=setting.tokens,
    zero_tail=True,
  )


def _one_hot(setting):
  """Builds the layer of the benchmarks, and its parameters."""
  moe = layers.OneHot(_layout(setting)).moe
  ranks = PartitionSpec("ep")

  def apply(params, tokens, topk_idx, topk_weights):
    return jax.shard_map(
      lambda params, *args: moe(*args, **params),
      mesh=setting.mesh,
      in_specs=ranks,
      out_specs=ranks,
    )(params, topk_idx, tokens, topk_weights)

  rng = np.random.default_rng(0)
  experts, hidden = setting.num_experts, setting.hidden
  shapes = dict(
    w_gate=(experts, hidden, INNER),
    w_up=(experts, hidden, INNER),
    w_down=(experts, INNER, hidden),
  )
  return apply, {
    name: rng.standard_normal(shape).astype(setting.dtype)
    for name, shape in shapes.items()
  }


def _swiglu(params, e, rows):
  gate, up = rows @ params["w_gate"][e], rows @ params["w_up"][e]
  return (jax.nn.silu(gate) * up) @ params["w_down"][e]


ONE_HOT = Layer(
  name="GShard's one-hot layer",
  build=_one_hot,
  expert=_swiglu,
  # A product over more elements rounds more often than the tolerance allows.
  # The number of experts determines the size of the program.
  supports=lambda setting: (
    setting.hidden <= 32 and setting.tokens <= 40 and setting.num_experts <= 8
  ),
  dtypes=("float32", "bfloat16"),
  **DERIVATIVES,
)
