# SPDX-License-Identifier: Apache-2.0
"""Our ops as subjects of `ep.testing`."""

import math

import ep
from ep.testing import Received, Tolerance, Transport

TIMEOUT_S = 20.0
DTYPES = ("float32", "bfloat16", "float16")
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
