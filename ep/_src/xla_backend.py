# SPDX-License-Identifier: Apache-2.0
"""backend="xla": `lax` collectives and gathers alone, on whatever XLA runs on.

An op is a function of one rank's arrays, and its primitive is lowered to it.

The choices of a rank, sorted by expert, are P streams of rows: one for each
destination, in the order of the slots there. A row is known on both sides by a
*code*: on the sender `d * B + i` is the i-th of the stream to rank d, on the
receiver `s * B + i` is the i-th of the stream from rank s, for B the longest
that a stream can be. Dispatch sends the streams, combine sends them back, and
only `ep_prepare` must tell the others anything: how many tokens of each rank
chose each expert, from which every rank computes the rest by itself.

Rows travel as whole numbers, so no platform can flush or quieten one. Sums say
in whole numbers what becomes of zeros and denormals, because XLA takes `0 + x`
for `x`, and platforms differ in what they flush.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, TYPE_CHECKING
import zlib

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from ep._src import checked, compat, rendezvous

if TYPE_CHECKING:
  from ep._src.group import EpGroup, EpLayerConfig
  from ep._src.primitive import OpParams

# See backends.py.
FUSES_WEIGHTS = True
ANY_PLACES = True
ONE_CAPACITY = False


def check_mesh(mesh: jax.sharding.Mesh, axis_name: str) -> None:
  del mesh, axis_name  # any will do


def connect(group: EpGroup) -> None:
  rendezvous.exchange(group, dict)  # nothing but the check that all agree


def check(name: str) -> None:
  del name  # ops report their own failures


def memory(name: str) -> tuple[int, int]:
  del name  # what there is, XLA keeps
  return 0, 0


def close(name: str) -> None:
  del name  # there is nothing to close


release = close


def close_released() -> None:
  pass  # nor here


def mem_bytes(layer: EpLayerConfig, num_tokens: int) -> int:
  return 4 * sum(_mem_sizes(_dims(layer, num_tokens)))


def lower(op: str, ctx, *operands, params: OpParams):
  dims = _dims(params.layer, params.num_tokens)._replace(
    tells=compat.can_call_python(ctx),
    nan_tail=checked.tail(params) == "nan",
  )
  fn = functools.partial(_OPS[op], dims)
  if op == "ep_combine" and params.checked:
    fn = functools.partial(_with_finite_result, dims, fn)
  if not dims.T:  # nothing travels, and nothing is wrong

    def fn(*_):
      return [jnp.zeros(out.shape, out.dtype) for out in ctx.avals_out]

  scope = jax.named_scope(f"{op}[{params.layer.name}]")
  return compat.lower_local(scope(fn))(ctx, *operands)


class _Dims(NamedTuple):
  """What is static of an op, by the names of docs/semantics.md."""

  layer: EpLayerConfig
  axis: str
  tells: bool  # whether the program can call Python, for it to raise
  nan_tail: bool  # whether rows past the last slab are NaN, and not zero
  P: int
  E: int
  L: int
  T: int
  K: int
  C: int
  B: int  # rows of the longest stream there can be
  nowhere: int  # P * B, the code of a row that does not travel


def _dims(layer: EpLayerConfig, num_tokens: int) -> _Dims:
  P, L, T, K = layer.ep_size, layer.num_local_experts, num_tokens, layer.top_k
  B = min(T * min(K, L), layer.capacity)
  return _Dims(
    layer=layer,
    axis=layer.group.axis_name,
    tells=True,
    nan_tail=False,
    P=P,
    E=P * L,
    L=L,
    T=T,
    K=K,
    C=layer.capacity,
    B=B,
    nowhere=P * B,
  )


def _mem_sizes(dims: _Dims) -> list[int]:
  """Lengths of the int32 arrays in `mem`: its stamp, then a `_Plan`."""
  choices, slots, ranks = dims.T * dims.K, dims.C, dims.P
  return [3, *[choices] * 2, *[slots] * 2, *[ranks] * 6, 1]


def _stamp(dims: _Dims, body: jax.Array) -> jax.Array:
  """What tells that `body` was made for this layer, these tokens, this rank."""
  layer = dims.layer
  made_for = repr((dims[4:], layer.alignment, layer.overflow)).encode()
  kind = np.int32(zlib.crc32(made_for) >> 1)
  # Odd factors: the sum tells any change of a word, and nearly any of several.
  factors = jnp.arange(1, 2 * body.size, 2, dtype=jnp.int32)
  return jnp.stack([kind, lax.axis_index(dims.axis), _sum(body * factors)])


class _Plan(NamedTuple):
  """Where rows go to and come from: int32 [...], seen from one rank.

  A side of an exchange has its rows in sequence, stream after stream.
  """

  order: jax.Array  # [T * K] the choices in sequence; unused ones at the end
  place: jax.Array  # [T * K] code of each choice
  slots: jax.Array  # [C] the slots in sequence
  source: jax.Array  # [C] code of each slot
  to_start: jax.Array  # [P] where the stream to each rank starts in `order`
  to_size: jax.Array  # [P] and how many rows it has
  from_start: jax.Array  # [P] where that from each rank starts in `slots`
  from_size: jax.Array  # [P]
  remote_from: jax.Array  # [P] `from_start` of this rank on each other
  remote_to: jax.Array  # [P] `to_start` of this rank on each other
  used: jax.Array  # [1] slots before the tail


def _prepare(dims: _Dims, idx: jax.Array):
  P, E, L, B, C = dims.P, dims.E, dims.L, dims.B, dims.C
  me = lax.axis_index(dims.axis)
  flat = idx.reshape(-1)
  expert = _int32(jnp.where((flat >= 0) & (flat < E), flat, E))
  choice = jnp.arange(flat.size, dtype=jnp.int32)
  in_order, order = lax.sort((expert, choice), num_keys=1, is_stable=True)
  first = _int32(jnp.searchsorted(in_order, jnp.arange(E + 1, dtype=jnp.int32)))
  config = jnp.full(1, dims.layer.fingerprint % 2**31, jnp.int32)
  faults, configs, counts = _share(
    dims, _find_fault(idx, E), config, jnp.diff(first)
  )

  # Slabs of each rank, as in reference.py.
  count = _sum(counts, 0).reshape(P, L)
  alignment = dims.layer.alignment
  padded = -(-count // alignment) * alignment
  end = _cumsum(padded, 1)
  offset = end - padded
  failed = _check(dims, idx.dtype, faults, configs[:, 0], end[:, -1])

  # Of each source rank and expert: the first slot, the rows that the capacity
  # lets through, and the first place in a stream.
  slot = offset.reshape(E) + _cumsum(counts, 0) - counts
  kept = jnp.clip(C - slot, 0, counts)
  streams = counts.reshape(P, P, L)
  place = (_cumsum(streams, 2) - streams).reshape(P, E)
  size = _sum(kept.reshape(P, P, L), 2)  # [source, destination]
  to_start = first[:-1:L]
  all_to_start = _cumsum(_sum(streams, 2), 1) - _sum(streams, 2)
  all_from_start = _cumsum(size, 0) - size

  # The choices, in sequence.
  row = choice - first[in_order]
  at = jnp.minimum(in_order, E - 1)
  travels = (in_order < E) & (row < kept[me, at])
  code = jnp.where(travels, at // L * B + place[me, at] + row, dims.nowhere)
  place_of_choice = jnp.zeros_like(code).at[order].set(code)

  # The slots: in a slab, runs of each source rank.
  mine = functools.partial(
    lax.dynamic_slice_in_dim, start_index=me * L, slice_size=L, axis=1
  )
  start, length, place = (mine(x).T.reshape(-1) for x in (slot, kept, place))
  slots = jnp.arange(C, dtype=jnp.int32)
  run = _int32(jnp.searchsorted(start, slots, side="right")) - 1
  row = slots - start[run]
  travels = row < length[run]
  i = place[run] + row
  source = jnp.where(travels, run % P * B + i, dims.nowhere)
  sequence = jnp.where(travels, all_from_start[run % P, me] + i, C)

  plan = _Plan(
    order=order,
    place=place_of_choice,
    slots=jnp.zeros_like(slots).at[sequence].set(slots, mode="drop"),
    source=source,
    to_start=to_start,
    to_size=size[me],
    from_start=all_from_start[:, me],
    from_size=size[:, me],
    remote_from=all_from_start[me],
    remote_to=all_to_start[:, me],
    used=end[me, -1:].clip(max=C),
  )
  body = jnp.concatenate(plan)
  mem = jnp.concatenate([_stamp(dims, body), body]) + failed
  group_sizes = end.clip(max=C) - offset.clip(max=C)
  token_counts = count.clip(max=(C - offset).clip(0))
  return [
    lax.bitcast_convert_type(mem, jnp.uint8).reshape(-1),
    jnp.where(failed, 0, group_sizes[me]),
    jnp.where(failed, 0, token_counts[me]),
    jnp.where(failed, -1, end[me, -1:]),
  ]


def _find_fault(idx: jax.Array, num_experts: int) -> jax.Array:
  """[kind, choice, id...] of the first wrong id; kind 0: there is none."""
  T, K = idx.shape
  wrong = (idx < -1) | (idx >= num_experts)
  before = jnp.arange(K) < jnp.arange(K)[:, None]
  repeats = ((idx[:, :, None] == idx[:, None, :]) & before).any(2) & (idx >= 0)
  kind = jnp.where(wrong, 1, jnp.where(repeats, 2, 0)).reshape(T * K)
  choice = jnp.argmax(kind > 0)
  words = lax.bitcast_convert_type(idx.reshape(-1)[choice], jnp.int32)
  return jnp.concatenate(
    [_int32(kind[choice])[None], _int32(choice)[None], words.reshape(-1)]
  )


def _share(dims: _Dims, *arrays: jax.Array) -> list[jax.Array]:
  """Vectors of all ranks, as [P, n], in one collective."""
  mine = jnp.concatenate(arrays)[None]
  if dims.P > 1:
    mine = lax.all_gather(mine, dims.axis, tiled=True)
  return jnp.split(mine, np.cumsum([a.size for a in arrays])[:-1], axis=1)


def _check(dims: _Dims, dtype, faults, configs, needed) -> jax.Array:
  """Whether a rank is at fault: see `_fail_if`. Alike on all ranks."""
  layer, K = dims.layer, dims.K
  op = f'ep_prepare(layer "{layer.name}")'

  def fail(faults, configs, needed):
    other = int(np.argmax(configs != configs[0]))
    if other:
      raise ValueError(
        f"{op}: the ranks disagree on a hash of the configuration:"
        f" {configs[0]} on rank 0, {configs[other]} on rank {other}; every rank"
        " must run the same program on the same layer"
      )
    for rank, (kind, choice, *words) in enumerate(faults):
      token, k = divmod(int(choice), K)
      expert = np.array(words, np.int32).view(dtype)[0]
      what = f"{op}, rank {rank}: topk_idx[{token}, {k}] = {expert}"
      if kind == 1:
        raise ValueError(
          f"{what}, but num_experts = {dims.E}; valid ids are -1..{dims.E - 1}"
        )
      if kind == 2:
        raise ValueError(
          f"{what} repeats an expert of token {token}; the top-k experts of a"
          " token must be distinct (use -1 for an unused choice)"
        )
    rank = int(np.argmax(needed > dims.C))
    raise ValueError(
      f"{op}: rank {rank} needs {needed[rank]} receive rows, but"
      f" recv_capacity_per_rank = {dims.C}; raise the capacity, balance the"
      ' routing, or use overflow="drop"'
    )

  failed = (faults[:, 0] > 0).any() | (configs != configs[0]).any()
  if layer.overflow == "error":
    failed |= (needed > dims.C).any()
  return _fail_if(dims, failed, fail, faults, configs, needed)


def _fail_if(
  dims: _Dims, failed: jax.Array, fail, *args: jax.Array
) -> jax.Array:
  """Calls `fail` on the host, with numpy arrays, for it to raise; else 0.

  What the ranks exchange from here on must depend on the result, so that none
  waits in an exchange for one that has failed. A program that cannot call
  Python goes on, with 1.
  """
  if not dims.tells:
    return _int32(failed)
  result = jax.ShapeDtypeStruct((), jnp.int32)
  return lax.cond(
    failed,
    lambda *args: compat.io_callback(
      lambda *args: fail(*map(np.asarray, args)), result, *args
    ),
    lambda *_: jnp.int32(0),
    *args,
  )


def _open(dims: _Dims, mem: jax.Array) -> tuple[_Plan, jax.Array]:
  """The plan in `mem`, and whether `_prepare` put it there."""
  words = lax.bitcast_convert_type(mem.reshape(-1, 4), jnp.int32)
  stamp, *plan = jnp.split(words, np.cumsum(_mem_sizes(dims))[:-1])
  return _Plan(*plan), (stamp == _stamp(dims, words[stamp.size :])).all()


class _Side(NamedTuple):
  """What a rank sends, and what it looks up in what it receives."""

  start: jax.Array  # [P] where the stream to each rank starts
  size: jax.Array  # [P]
  remote_start: jax.Array  # [P] where that rank puts it
  recv_start: jax.Array  # [P] where this rank puts the stream from each
  recv_size: jax.Array  # [P]
  codes: jax.Array  # [n] of the rows wanted; `nowhere`: none
  is_nan: jax.Array  # [n] or [], whether such a row is NaN, and not zero


def _forth(dims: _Dims, plan: _Plan) -> _Side:
  return _Side(
    plan.to_start,
    plan.to_size,
    plan.remote_from,
    plan.from_start,
    plan.from_size,
    plan.source,
    dims.nan_tail & (jnp.arange(dims.C) >= plan.used),
  )


def _back(plan: _Plan) -> _Side:
  return _Side(
    plan.from_start,
    plan.from_size,
    plan.remote_to,
    plan.to_start,
    plan.to_size,
    plan.place,
    jnp.bool_(False),
  )


def _exchange(dims: _Dims, side: _Side, rows, sequence, sound) -> jax.Array:
  """Sends `rows[sequence]`, stream by stream, and returns those of the codes.

  Of a rank whose handle is not `sound`, every row sent or returned is NaN. Any
  index is kept in range, whatever the handle says.
  """
  bits = lax.bitcast_convert_type(rows, f"uint{8 * rows.dtype.itemsize}")
  nan = jnp.array(jnp.iinfo(bits.dtype).max, bits.dtype)
  B, codes = dims.B, side.codes

  def take(x, index):
    return x.at[index].get(mode="fill", fill_value=0)

  def padded(bits):
    """One bucket of B rows for each rank."""
    at = side.start[:, None] + jnp.arange(B, dtype=jnp.int32)
    sent = jnp.where(sound, take(bits, take(sequence, at)), nan)
    if dims.P > 1:
      sent = lax.all_to_all(sent, dims.axis, 0, 0)
    received = sent.reshape(dims.nowhere, *sent.shape[2:])
    return received.at[codes].get(mode="clip")

  def ragged(bits):
    sent = jnp.where(sound, take(bits, sequence), nan)
    room = codes.size
    start = side.start.clip(0, len(sent))
    remote_start = side.remote_start.clip(0, room)
    size = side.size.clip(0)
    size = jnp.minimum(
      size, jnp.minimum(len(sent) - start, room - remote_start)
    )
    # Rows that no rank writes are never read, so any value will do. XLA would
    # build a constant once, outside of a loop, and copy it in each turn.
    unwritten = jnp.broadcast_to(sent.reshape(-1)[0], (room, *sent.shape[1:]))
    received = lax.ragged_all_to_all(
      sent,
      unwritten,
      start,
      size,
      remote_start,
      side.recv_size.clip(0, room),
      axis_name=dims.axis,
    )
    start = side.recv_start.at[codes // B].get(mode="clip")
    return received.at[start + codes % B].get(mode="clip")

  if dims.P == 1:
    out = padded(bits)
  else:
    out = lax.platform_dependent(bits, cpu=padded, default=ragged)

  # In bfloat16 this selects between two variables, for with a constant XLA:CPU
  # loses bits. Of the last element, denormals are flushed and NaNs quietened by
  #
  #   bitcast_convert_type(jnp.where(s, x, jnp.uint16(65535)), jnp.bfloat16)
  #
  # for a traced bool s and uint16 [7] x: a cast of a choice with a constant is
  # to LLVM a choice of casts, and if a bfloat16 is not only loaded and stored,
  # but one of two in a register, its code for x86 goes by way of float32.
  travels = sound & (codes < dims.nowhere)
  other = jnp.where(side.is_nan | ~sound, nan, jnp.zeros_like(nan))
  travels, other = (
    x.reshape(*x.shape, *[1] * (out.ndim - x.ndim)) for x in (travels, other)
  )
  return lax.bitcast_convert_type(jnp.where(travels, out, other), rows.dtype)


def _dispatch(dims: _Dims, mem, tokens, weights):
  plan, sound = _open(dims, mem)
  side, order = _forth(dims, plan), plan.order
  return [
    _exchange(dims, side, tokens, order // dims.K, sound),
    _exchange(dims, side, weights.reshape(-1), order, sound),
  ]


def _combine_bwd(dims: _Dims, mem, tokens):
  plan, sound = _open(dims, mem)
  side = _forth(dims, plan)
  return [_exchange(dims, side, tokens, plan.order // dims.K, sound)]


def _combine(dims: _Dims, mem, rows, weights=None):
  plan, sound = _open(dims, mem)
  exchange = functools.partial(_exchange, dims, _back(plan))
  terms = _flush(exchange(rows, plan.slots, sound).astype(jnp.float32))
  if weights is not None:
    weights = _flush(exchange(weights, plan.slots, sound))
    # Nothing can contract this product and the sum: bits lie between them.
    terms = _flush(terms * weights[:, None])
  terms = terms.reshape(dims.T, dims.K, -1)
  out = terms[:, 0]
  for k in range(1, dims.K):
    out = _flush(out + terms[:, k])
  return [_flush(out, sign=0).astype(rows.dtype)]


def _flush(x: jax.Array, sign: int = 1 << 31) -> jax.Array:
  """float32 `x` with denormals as zeros, and of the signs of zeros `sign`."""
  bits = lax.bitcast_convert_type(x, jnp.uint32)
  is_small = bits & np.uint32(0x7F800000) == 0
  bits = jnp.where(is_small, bits & np.uint32(sign), bits)
  return lax.bitcast_convert_type(bits, jnp.float32)


def _dispatch_bwd(dims: _Dims, mem, rows, weights):
  plan, sound = _open(dims, mem)
  choices = _exchange(dims, _back(plan), weights, plan.slots, sound)
  return [*_combine(dims, mem, rows), choices.reshape(dims.T, dims.K)]


def _with_finite_result(dims: _Dims, combine, mem, *operands):
  (out,) = combine(mem, *operands)
  wrong = ~jnp.isfinite(out).reshape(-1)
  first = jnp.stack([_int32(wrong.any()), _int32(jnp.argmax(wrong))])
  (all_first,) = _share(dims, first)

  def fail(all_first):
    rank = int(np.argmax(all_first[:, 0]))
    token, column = divmod(int(all_first[rank, 1]), out.shape[1])
    raise ValueError(
      f'ep_combine(layer "{dims.layer.name}"): out[{token}, {column}] of rank'
      f" {rank} is not finite"
    )

  failed = _fail_if(dims, (all_first[:, 0] > 0).any(), fail, all_first)
  return [lax.optimization_barrier((out, failed))[0]]


def _int32(x) -> jax.Array:
  return x.astype(jnp.int32)


def _sum(x, axis=None) -> jax.Array:
  return x.sum(axis, dtype=jnp.int32)


def _cumsum(x, axis) -> jax.Array:
  return x.cumsum(axis, dtype=jnp.int32)


_OPS = {
  "ep_prepare": _prepare,
  "ep_dispatch": _dispatch,
  "ep_combine": _combine,
  "ep_dispatch_bwd": _dispatch_bwd,
  "ep_combine_bwd": _combine_bwd,
}
