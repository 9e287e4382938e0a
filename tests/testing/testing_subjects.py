# SPDX-License-Identifier: Apache-2.0
"""The transports and the layer that kit_test tests with `ep.testing`."""

import functools

import jax
from jax.sharding import PartitionSpec
import numpy as np

from benchmarks import layers
from benchmarks.exchanges import PaddedScatter
from benchmarks.workload import Layout, Shape
import ep
from ep.testing import Layer, Received, Tolerance, Transport

TIMEOUT_S = 20.0
DTYPES = ("float32", "bfloat16", "float16")
INNER = 4  # Inner size of an expert.


def _ep(setting, *, overflow="drop", **options):
  group = ep.ep_bootstrap(
    setting.mesh,
    num_experts=setting.num_experts,
    top_k=setting.top_k,
    recv_capacity_per_rank=setting.capacity,
    alignment=setting.alignment,
    max_token_dtype=setting.dtype,
    overflow=overflow,
    timeout_s=TIMEOUT_S,
    **options,
  )
  layer = ep.EpLayerConfig(group)

  def dispatch(tokens, topk_idx, topk_weights, scales=None):
    handle = ep.ep_prepare(layer, topk_idx)
    rows, weights, *scales = ep.ep_dispatch(
      handle, tokens, topk_weights, scales=scales
    )
    return Received(rows, weights, handle.group_sizes, handle, *scales)

  return dispatch, lambda rows, handle: ep.ep_combine(handle, rows)


def _has_aligned_slabs(setting):
  """Returns whether the capacity suffices for one block per expert."""
  return setting.capacity >= setting.alignment * setting.num_local_experts


DERIVATIVES = dict(gradients=True, second_order=True, jvp=True)

HOST = Transport(
  name="ep, backend host",
  location="testing_subjects:HOST",
  build=functools.partial(_ep, backend="host"),
  supports=_has_aligned_slabs,
  dtypes=DTYPES,
  **DERIVATIVES,
  reports_death=True,
  reports_disagreement=True,
  tail="zero",
  alignments=(1, 4, 16),
  overflow="drop",
  special_values=True,
  scales=True,
)

# XLA's collectives guarantee no error if a process dies or disagrees.
XLA = Transport(
  name="ep, backend xla",
  build=functools.partial(_ep, backend="xla", overflow="error"),
  supports=_has_aligned_slabs,
  dtypes=("float32", "bfloat16"),
  **DERIVATIVES,
  tail="zero",
  alignments=(16,),
  overflow="error",
  special_values=True,
)


def _nccl(setting):
  """Builds the ops with the buffer sizes that nccl needs."""
  sizes = dict(max_tokens_per_rank=setting.tokens, hidden_dim=setting.hidden)
  return _ep(setting, backend="nccl", **sizes)


# nccl reports an overflow and disagreeing ranks in a later op. `supports` has
# the limits of docs/gpu.md that a drawn size may exceed.
NCCL = Transport(
  name="ep, backend nccl",
  supports=lambda setting: (
    _has_aligned_slabs(setting)
    and setting.hidden % 8 == 0
    and setting.num_experts % 4 == 0
    and setting.tokens <= 8192
    and setting.capacity >= -(-setting.tokens // 4) * 4
  ),
  build=_nccl,
  dtypes=DTYPES,
  tolerance=Tolerance(1),
  **DERIVATIVES,
  tail="zero",
  alignments=(1, 4, 16),
  overflow="drop",
  scales=True,
)


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


def _padded(setting):
  """Builds hand-written ops of the benchmarks."""
  layout = _layout(setting)
  exchange = PaddedScatter(layout)

  def dispatch(tokens, topk_idx, topk_weights):
    handle = exchange.prepare(topk_idx)
    moved = exchange.dispatch(handle, tokens, topk_weights)
    return Received(*moved, layers.group_sizes(layout, topk_idx), handle)

  def combine(rows, handle):
    return exchange.combine(handle, rows)

  return dispatch, combine


PADDED = Transport(
  name="sort + padded all_to_all",
  build=_padded,
  # No benchmark sends more rows to an expert.
  supports=lambda setting: setting.tokens <= 400,
  dtypes=("float32", "bfloat16"),
  tolerance=Tolerance(1),
  gradients=True,
  tail="zero",
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

# The rules for the contenders of the benchmarks.
_OF_BENCHMARKS = "sizes rows weights tail output gradients jvp second_order"
_BENCHMARKS = {x: _OF_BENCHMARKS.split() for x in (PADDED, ONE_HOT)}
# scales_test tests scales of each dtype on the xla backend.
_OF_XLA = (
  f"{_OF_BENCHMARKS} padding special_values unread repeatable overflow soak"
)

# The transports and layers of each platform, and their rules. The rules None
# stand for all rules.
SUBJECTS = {
  "cpu": {HOST: None, XLA: _OF_XLA.split()} | _BENCHMARKS,
  "gpu": {NCCL: None} | _BENCHMARKS,
}
