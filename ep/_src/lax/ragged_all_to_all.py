# SPDX-License-Identifier: Apache-2.0
"""A `lax.ragged_all_to_all` that also runs on CPUs.

XLA:CPU has no such collective. So on CPUs each rank gathers the operands of all
ranks, and selects its rows.

The op is linear in `operand` and `output`. The transpose in `operand` is the op
with `back=True`: it sends each slice back, and adds slices that overlap. The
transpose in `output` keeps the rows that no slice writes.
"""

from __future__ import annotations

from collections.abc import Sequence
import contextlib
import functools
import itertools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from ep._src.base import arrays, compat
from ep._src.base.arguments import check
from ep._src.base.compat import ad, fail_if
from ep._src.lax import primitive

_NAME = "ragged_all_to_all"


def ragged_all_to_all(
  operand: jax.Array,
  output: jax.Array,
  input_offsets: jax.Array,
  send_sizes: jax.Array,
  output_offsets: jax.Array,
  recv_sizes: jax.Array,
  *,
  axis_name: str | Sequence[str],
  axis_index_groups: Sequence[Sequence[int]] | None = None,
) -> jax.Array:
  """Sends slices of rows to other ranks, as `jax.lax.ragged_all_to_all` does.

  Each of the P ranks sends K slices. Slice i goes to rank i // S, S = K / P:

      for i in range(K):   # on the rank that sends
        rows = operand[input_offsets[i]:][:send_sizes[i]]
        SEND(rows, output_offsets[i], to=i // S)

      for i in range(K):   # on the rank that receives
        rows, offset = RECEIVE(source=i // S)    # recv_sizes[i] rows
        output[offset:][:recv_sizes[i]] = rows

  For example, with P = 2:

      on rank 0                     on rank 1
        operand = [1, 2, 2]           operand = [3, 4, 0]
        output = [0, 0, 0, 0]         output = [0, 0, 0, 0]
        input_offsets = [0, 1]        input_offsets = [0, 1]
        send_sizes = [1, 2]           send_sizes = [1, 1]
        output_offsets = [0, 0]       output_offsets = [1, 2]
        recv_sizes = [1, 1]           recv_sizes = [2, 1]
        result = [1, 3, 0, 0]         result = [2, 2, 4, 0]

  On platforms other than the CPU, the function lowers to JAX's op. On CPUs each
  rank needs memory for the operands of all ranks. Call the function inside
  `jax.shard_map`; it needs no `EpGroup`.

  Differentiable in `operand` and `output`, in both modes and to any order. If a
  row of `operand` is in several slices, CPUs add the gradients of these slices.
  (On other platforms JAX's op overwrites instead.) Where slices overlap in
  `output`, CPUs keep the last slice in the order above, and derivatives are
  unspecified.

  Args:
    operand: [N, ...], the rows to send, of any dtype except PRNG keys.
    output: [M, ...], with the dtype and row shape of `operand`. The result has
      its rows where no slice arrives.
    input_offsets: integers [K], the row of `operand` where each slice starts.
    send_sizes: integers [K], the number of rows in each slice.
    output_offsets: integers [K], the row of the *receiver's* `output` where
      each slice starts.
    recv_sizes: integers [K], the number of rows in each slice that this rank
      receives: `lax.all_to_all(send_sizes, axis_name, 0, 0, tiled=True)`.
    axis_name: the axis, or axes, of the ranks.
    axis_index_groups: lists of axis indices, all of one length, which together
      have every index once. The ranks of a list exchange rows with each other,
      numbered by their position in the list.

  Returns:
    [M, ...]: `output` with the rows that were received.

  Raises:
    ValueError: shapes or groups do not fit; the axis cannot be divided.
    TypeError: dtypes do not fit.
    NotImplementedError: `axis_name` is the axis of a `vmap`.
    jax.errors.JaxRuntimeError: on CPUs, when the program runs, on all ranks of
      the axis (or group): a slice with rows leaves `operand` or `output`, or
      sender and receiver disagree about its size. Programs from `jax.export`,
      and programs where `jax.shard_map` leaves an axis automatic, cannot raise,
      and do not send such a slice. On other platforms JAX's op defines the
      result.
  """
  operand, output = map(jnp.asarray, (operand, output))
  slices = {
    name: arrays.integers(_NAME, name, x)
    for name, x in dict(
      input_offsets=input_offsets,
      send_sizes=send_sizes,
      output_offsets=output_offsets,
      recv_sizes=recv_sizes,
    ).items()
  }
  names = axis_name if isinstance(axis_name, list | tuple) else [axis_name]
  check(
    len(names) > 0, _NAME, "axis_name is empty; name the axis of the ranks."
  )
  groups = axis_index_groups
  if groups is not None:
    groups = tuple(map(tuple, groups))
  _check_rows(operand, output)
  ranks = _group_size(lax.axis_size(tuple(names)), groups)
  manual = jax.sharding.get_abstract_mesh().manual_axes
  for name in names:
    if name not in manual:
      raise NotImplementedError(
        f"{_NAME}: {name!r} is the axis of a jax.vmap; use jax.shard_map."
      )
  size = slices["input_offsets"].size
  for name, x in slices.items():
    check(
      x.shape == (size,) and size > 0 and size % ranks == 0,
      _NAME,
      f"{name} is {list(x.shape)}, but input_offsets, send_sizes,"
      f" output_offsets and recv_sizes must all be [K], and K a multiple of the"
      f" {ranks} ranks.",
    )
  return _bind(
    operand,
    output,
    *slices.values(),
    axis_name=tuple(names),
    axis_index_groups=groups,
    back=False,
  )


def install() -> contextlib.ExitStack:
  """Makes `jax.lax.ragged_all_to_all` itself run on CPUs.

      ep.lax.install()            # for the rest of the process, or

      with ep.lax.install():      # for a while
        train_step(state, batch)

  On CPUs, JAX's op then runs as `ep.lax.ragged_all_to_all` does. JAX's rules
  for derivatives and other platforms do not change. `install` affects only the
  process that calls it: call it in every process, at the same point of the
  program. A nested call, and the end of its context, change nothing.

  Returns:
    A context; its end, or its `close()`, restores the previous state. Programs
    compiled ahead of time continue to work. JAX traces a jitted function
    separately inside and outside of the context.
  """
  stack = contextlib.ExitStack()
  stack.callback(
    compat.lower_instead(compat.ragged_all_to_all_p, _lower_on_cpu, "cpu")
  )
  return stack


def _check_rows(operand: jax.Array, output: jax.Array) -> None:
  _check_dtype(operand.dtype)
  check(
    operand.ndim == output.ndim > 0 and operand.shape[1:] == output.shape[1:],
    _NAME,
    f"operand is {list(operand.shape)} and output {list(output.shape)}, but"
    " they must be [N, ...] and [M, ...] with rows of one shape.",
  )
  if operand.dtype != output.dtype:
    raise TypeError(
      f"{_NAME}: operand is of {operand.dtype} and output of {output.dtype};"
      " cast one of them."
    )


def _check_dtype(dtype: jnp.dtype) -> None:
  if jnp.issubdtype(dtype, jax.dtypes.extended):
    raise TypeError(
      f"{_NAME}: operand is of {dtype}, which it cannot send; for keys, send"
      " jax.random.key_data(keys), and call jax.random.wrap_key_data on the"
      " result."
    )


def _group_size(ranks: int, groups: Sequence[Sequence[int]] | None) -> int:
  if groups is None:
    return ranks
  sizes = {len(group) for group in groups}
  check(
    len(sizes) == 1 and sorted(itertools.chain(*groups)) == list(range(ranks)),
    _NAME,
    f"axis_index_groups = {groups}, but they must be of one size, and hold each"
    f" index of the axis, 0..{ranks - 1}, once.",
  )
  return sizes.pop()


def _bind(*operands: jax.Array, axis_name: Any, **params: Any) -> jax.Array:
  operands = compat.vary_together(*operands, axes=axis_name)
  outs: list[jax.Array] = _op_p.bind(*operands, axis_name=axis_name, **params)
  return outs[0]


def _types(operand: Any, output: Any, *slices: Any, **params: Any) -> list[Any]:
  return [output.update(weak_type=False)]


def _jvp(
  primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[list[jax.Array], list[jax.Array]]:
  operand_dot, output_dot = map(compat.instantiate_zeros, tangents[:2])
  return (
    [_bind(*primals, **params)],
    [_bind(operand_dot, output_dot, *primals[2:], **params)],
  )


def _transpose(
  cts: Sequence[Any],
  operand: Any,
  output: Any,
  *slices: Any,
  back: bool,
  **axis: Any,
) -> list[Any]:
  (ct,) = map(compat.instantiate_zeros, cts)

  def zeros(x: Any) -> Any:
    aval = x.aval if ad.is_undefined_primal(x) else jax.typeof(x)
    return compat.instantiate_zeros(ad.Zero(aval))

  operand_ct = output_ct = None
  if ad.is_undefined_primal(operand):
    operand_ct = _bind(ct, zeros(operand), *slices, back=not back, **axis)
  if ad.is_undefined_primal(output):
    output_ct = _bind(zeros(operand), ct, *slices, back=back, **axis)
  return [operand_ct, output_ct, *[None] * len(slices)]


def _on_others(
  operand: jax.Array,
  output: jax.Array,
  *slices: jax.Array,
  back: bool,
  **axis: Any,
) -> list[jax.Array]:
  """Lowers the op to JAX's op, which overwrites rows and never adds them."""
  sources, sizes, targets, expected = slices
  if back:
    here, there = (
      lax.all_to_all(x, **axis, split_axis=0, concat_axis=0, tiled=True)
      for x in (sources, targets)
    )
    slices = there, expected, here, sizes
  return [lax.ragged_all_to_all(operand, output, *slices, **axis)]


def _on_cpu(
  operand: jax.Array,
  output: jax.Array,
  *slices: jax.Array,
  axis_name: Any,
  axis_index_groups: Any,
  back: bool,
  can_raise: bool,
) -> list[jax.Array]:
  """Gathers slices and operands of all ranks, and selects this rank's rows."""
  gather = functools.partial(
    lax.all_gather, axis_name=axis_name, axis_index_groups=axis_index_groups
  )
  # The four arrays below have shape [source rank, target rank, slice].
  every = gather(jnp.stack(list(map(arrays.int32, slices))))
  ranks, _, count = every.shape
  every = every.reshape(ranks, 4, ranks, count // ranks).swapaxes(0, 1)
  sources, sizes, targets, expected = every
  expected = expected.swapaxes(0, 1)

  num_in, num_out = len(operand), len(output)
  if back:
    num_in, num_out = num_out, num_in
  is_sound = (sources >= 0) & (targets >= 0) & (sizes >= 0)
  is_sound &= (sizes <= num_in - sources) & (sizes <= num_out - targets)
  is_sound = (sizes == expected) & (is_sound | (sizes == 0))
  members = np.asarray(axis_index_groups or [range(ranks)])
  places = jnp.asarray(np.argsort(members, axis=None))
  group, me = divmod(places[lax.axis_index(axis_name)], ranks)
  failed = fail_if(
    ~is_sound.all(),
    functools.partial(_fail, num_in, num_out),
    *(jnp.asarray(members)[group], is_sound, sources, sizes, targets, expected),
    can_raise=can_raise,
  )
  if not num_in or not num_out:
    return [output]

  def mine(x: jax.Array) -> jax.Array:
    """Returns the slices [K] that this rank receives."""
    return x[me].ravel() if back else x[:, me].ravel()

  there, here = map(mine, (targets, sources) if back else (sources, targets))
  sizes = mine(jnp.where(is_sound, sizes, 0))
  operand, _ = lax.optimization_barrier((operand, failed))
  rows, result = gather(_to_bits(operand)), _to_bits(output)
  result = _take(
    rows, result, there, sizes, here, dtype=output.dtype, adds=back
  )
  return [_of_bits(result, output.dtype)]


def _take(
  rows: jax.Array,
  output: jax.Array,
  there: jax.Array,
  size: jax.Array,
  here: jax.Array,
  *,
  dtype: jnp.dtype,
  adds: bool,
) -> jax.Array:
  """Writes slices of all ranks' `rows` [P, N, ...], as bits, to `output`.

  Slice k of K has size[k] rows. It starts at row there[k] of rank k // (K / P),
  and is written to `output` from row here[k] on. Where slices overlap, the last
  slice wins; with `adds`, they are added from the last to the first.
  """
  at = lax.iota(jnp.int32, len(output))

  def before(k: jax.Array | int) -> Any:
    """Returns, for each row, the last slice before k that writes it, or -1."""

    def step(i: jax.Array, last: jax.Array) -> jax.Array:
      place = at - here[i]
      holds = (place >= 0) & (place < size[i]) & (i < k)
      return jnp.where(holds, i, last)

    return lax.fori_loop(0, size.size, step, jnp.full_like(at, -1))

  def of(k: jax.Array) -> jax.Array:
    # Where k is -1, this reads an arbitrary row, which `put` ignores.
    row = jnp.where(k >= 0, there[k] + at - here[k], 0)
    return rows.at[k.clip(0) // (size.size // len(rows)), row].get(mode="clip")

  def put(k: jax.Array, x: jax.Array, otherwise: jax.Array) -> jax.Array:
    return jnp.where(arrays.expanded(k >= 0, x.ndim), x, otherwise)

  last = before(size.size)
  result = put(last, of(last), output)
  if not adds:
    return result

  def add(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    k, total = state
    x = _of_bits(total, dtype) + _of_bits(of(k), dtype)
    return before(k), put(k, _to_bits(x), total)

  state = before(last), result
  return lax.while_loop(lambda state: (state[0] >= 0).any(), add, state)[1]


def _fail(
  num_in: int,
  num_out: int,
  members: np.ndarray,
  is_sound: np.ndarray,
  there: np.ndarray,
  size: np.ndarray,
  here: np.ndarray,
  expected: np.ndarray,
) -> None:
  at = tuple(np.argwhere(~is_sound)[0])
  source, target = members[list(at[-3:-1])]
  raise ValueError(
    f"{_NAME}: rank {source} sends {size[at]} rows to rank {target}, from row"
    f" {there[at]} of operand to row {here[at]} of output, and rank {target}"
    f" expects {expected[at]}; operand has {num_in} rows and output {num_out}."
    " A slice must lie in both, and send_sizes and recv_sizes must agree."
  )


# Floats are copied as integers, because XLA:CPU changes the bits of bfloat16
# NaNs and denormals in a select with a constant.
def _to_bits(x: jax.Array) -> jax.Array:
  if not jnp.issubdtype(x.dtype, jnp.floating):
    return x
  return lax.bitcast_convert_type(x, f"uint{jnp.finfo(x.dtype).bits}")


def _of_bits(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
  return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def _lower_on_cpu(
  ctx: Any, *operands: Any, back: bool = False, **axis: Any
) -> Any:
  _check_dtype(ctx.avals_in[0].dtype)
  can_raise = compat.can_call_python(ctx) and not compat.is_partitioned(ctx)
  fn = functools.partial(_on_cpu, back=back, can_raise=can_raise, **axis)
  return compat.lower_local(jax.named_scope(_NAME)(fn))(ctx, *operands)


_op_p = primitive.new(
  _NAME, _types, compat.lower_local(_on_others), cpu=_lower_on_cpu
)
ad.primitive_jvps[_op_p] = _jvp
ad.primitive_transposes[_op_p] = _transpose
