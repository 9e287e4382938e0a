# SPDX-License-Identifier: Apache-2.0
"""ep.lax.ragged_all_to_all sends exactly the rows that the slices select."""

import functools
from typing import NamedTuple

import jax
from jax import export, lax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import ml_dtypes
import numpy as np
import pytest

from conftest import assert_shards_equal, make_mesh, to_global
import ep
from groups import of_one_process

N, M, H = 13, 17, 3  # Rows of operand, rows of output, elements per row.
OUTER, INNER = "outer", "inner"  # axes
FOUR = [range(4)]  # one group of ranks


class Slices(NamedTuple):
  """Offsets and sizes of all ranks' slices, each an integer array [P, K]."""

  input_offsets: np.ndarray
  send_sizes: np.ndarray
  output_offsets: np.ndarray
  recv_sizes: np.ndarray


def moves(slices, groups):
  """Yields source and target of each slice, as (rank, rows)."""
  for group in groups:
    each = slices.send_sizes.shape[1] // len(group)
    for source in group:
      for i, target in enumerate(np.repeat(group, each)):
        there, size, here, _ = (x[source, i] for x in slices)
        yield (
          (source, slice(there, there + size)),
          (target, slice(here, here + size)),
        )


def moved(operand, output, slices, groups):
  """Returns expected outputs, for operands [P, N, ...], outputs [P, M, ...]."""
  result = output.copy()
  for source, target in moves(slices, groups):
    result[target] = operand[source]
  return result


def moved_back(ct, operand, slices, groups):
  """Returns the expected cotangents of operand and output."""
  operand_ct, output_ct = np.full_like(operand, -0.0), ct.copy()
  is_sent = np.zeros(operand.shape[:2], bool)
  for source, target in moves(slices, groups):
    operand_ct[source] += ct[target]
    is_sent[source] = True
    output_ct[target] = 0
  return np.where(is_sent[..., None], operand_ct, 0), output_ct


def draw(rng, groups, each=2, kind="any"):
  """Returns slices with disjoint targets, `each` per pair of ranks."""
  count = len(groups[0]) * each
  shape = sum(map(len, groups)), count
  slices = Slices(*(np.zeros(shape, np.int32) for _ in Slices._fields))
  for group in groups:
    for position, target in enumerate(group):
      # Cut the rows of the target at random; every other piece is a gap.
      cuts = np.sort(rng.integers(0, M + 1, size=2 * count))
      if kind == "full":
        cuts = np.repeat(np.linspace(0, M, count + 1).astype(int), 2)[1:-1]
      for k, (start, end) in enumerate(rng.permutation(cuts.reshape(-1, 2))):
        at = group[k // each], position * each + k % each
        size = 0 if kind == "empty" else min(end - start, N)
        slices.input_offsets[at] = rng.integers(0, N - size + 1)
        slices.send_sizes[at] = slices.recv_sizes[target, k] = size
        slices.output_offsets[at] = start
  return slices


def small(rng, *shape):
  """Returns floats whose sums are exact, including negative zeros."""
  x = rng.integers(-9, 10, size=shape).astype(np.float32)
  return np.where(x == 0, -0.0, x).astype(np.float32)


def on_ranks(fn, mesh, **options):
  """Returns a jitted program of arrays [P, ...] that calls `fn` per rank."""

  def of_rank(*args):
    outs = fn(*jax.tree.map(lambda x: x[0], args))
    return jax.tree.map(lambda x: x[None], outs)

  spec = P(tuple(options.get("axis_names", mesh.axis_names)))
  options |= dict(mesh=mesh, in_specs=spec, out_specs=spec)
  return jax.jit(jax.shard_map(of_rank, **options))


def place(mesh, *args):
  """Returns arrays [P, ...] as global arrays."""
  spec = P(mesh.axis_names)
  return jax.tree.map(lambda x: to_global(x, mesh, spec), args)


def value_and_grads(
  operand, output, ct, slices, op=ep.lax.ragged_all_to_all, **axis
):
  axis = axis or dict(axis_name=INNER)
  value, vjp = jax.vjp(lambda *x: op(*x, *slices, **axis), operand, output)
  return value, vjp(ct)


def expected(operand, output, ct, slices, groups=FOUR):
  """Returns the expected result of `value_and_grads` on all ranks."""
  value = moved(operand, output, slices, groups)
  return value, moved_back(ct, operand, slices, groups)


@pytest.fixture(name="mesh")
def mesh_of_four():
  return make_mesh({INNER: 4})


@pytest.mark.parametrize("ranks", [4, 1])
def test_values_and_derivatives_are_exact(ranks):
  mesh, groups = make_mesh({INNER: ranks}), [range(ranks)]

  def run(operand, output, slices, tangents, ct, weight):
    def move(operand, output):
      return ep.lax.ragged_all_to_all(operand, output, *slices, axis_name=INNER)

    def grad(operand, output):
      def loss(*args):
        return (weight * move(*args) ** 2).sum() / 2

      return jax.grad(loss, (0, 1))(operand, output)

    value, tangent = jax.jvp(move, (operand, output), tangents)
    _, vjp = jax.vjp(move, operand, output)
    _, second = jax.jvp(grad, (operand, output), tangents)
    return value, tangent, vjp(ct), second

  program = on_ranks(run, mesh, check_vma=ranks % 2 == 0)
  rng = np.random.default_rng(ranks)
  for kind in ["any"] * 8 + ["empty", "full"]:
    slices = draw(rng, groups, kind=kind)
    operand, output, *tangents, ct, weight = (
      small(rng, ranks, rows, H) for rows in (N, M, N, M, M, M)
    )
    tangent = moved(*tangents, slices, groups)
    second = moved_back(weight * tangent, operand, slices, groups)
    args = operand, output, slices, tuple(tangents), ct, weight
    actual = program(*place(mesh, *args))
    # Zeros of products may have either sign.
    expected = moved(operand, output, slices, groups), tangent
    expected += (moved_back(ct, operand, slices, groups),)
    jax.tree.map(assert_shards_equal, actual[:3], expected)
    jax.tree.map(
      lambda x, y: assert_shards_equal(x + 0, y + 0), actual[3], second
    )


@of_one_process
def test_transformations_and_axes():
  """Tests scan, vmap, axis_index_groups and several axes."""
  mesh = make_mesh({OUTER: 2, INNER: 2})
  rng = np.random.default_rng(0)
  operand, output, ct = (small(rng, 4, rows, H) for rows in (N, M, M))
  pairs, groups = [(0, 1), (2, 3)], [(3, 0), (1, 2)]
  examples = [
    [draw(rng, ranks) for _ in "123"] for ranks in (FOUR, pairs, groups)
  ]

  def run(operand, output, ct, *slices):
    both = dict(axis_name=(OUTER, INNER))
    by_both, by_inner, by_group = slices

    def of_each(slices, **axis):
      return value_and_grads(operand, output, ct, slices, **axis)

    def step(count, slices):
      return count + 1, of_each(slices, **both)

    def of_examples(slices, **axis):
      return jax.vmap(functools.partial(of_each, **axis))(slices)

    def move_rows(rows):
      first = jax.tree.map(lambda x: x[0], by_both)
      return ep.lax.ragged_all_to_all(rows, output, *first, **both)

    rows = jax.vmap(move_rows, 1, 1)(jnp.stack([operand, -operand], 1))
    return rows, [
      lax.scan(step, 0, by_both)[1],
      of_examples(by_both, **both),
      of_examples(by_inner, axis_name=INNER),
      of_examples(by_group, **both, axis_index_groups=groups),
    ]

  stack = functools.partial(jax.tree.map, lambda *x: np.stack(x, 1))
  arrays = operand, output, ct
  args = place(mesh, *arrays, *(stack(*x) for x in examples))
  actual = on_ranks(run, mesh)(*args)

  rows = [moved(x, output, examples[0][0], FOUR) for x in (operand, -operand)]
  want = [
    stack(*(expected(*arrays, x, ranks) for x in draws))
    for ranks, draws in zip([FOUR, pairs, groups], examples, strict=True)
  ]
  want = np.stack(rows, 2), [want[0], *want]
  jax.tree.map(assert_shards_equal, actual, want)


@of_one_process
def test_the_axis_of_a_vmap_is_refused():
  with pytest.raises(NotImplementedError, match="'inner' is the axis of"):
    jax.vmap(move, axis_name=INNER)(*two_arrays(), one_slice())


@of_one_process
def test_many_slices_take_no_table_of_rows():
  """Temporaries take less than a byte per pair of slice and row."""
  mesh, count, rows = make_mesh({INNER: 4}), 256, 4096
  operand, output = np.zeros((4, 1)), np.zeros((4, rows))
  slices = Slices(*np.zeros((4, 4, count), int))
  program = on_ranks(move, mesh).lower(*place(mesh, operand, output, slices))
  temporaries = program.compile().memory_analysis().temp_size_in_bytes
  assert temporaries < count * rows


_DTYPES = [
  ml_dtypes.bfloat16,
  ml_dtypes.float8_e4m3fn,
  np.float32,
  np.bool_,
  np.int8,
  np.complex64,
]


def test_any_dtype_keeps_its_bits(mesh):
  """The op keeps denormals and payloads of NaNs, in rows of any shape.

  The op keeps the other rows of `output`. Offsets may have any integer dtype.
  """
  rng = np.random.default_rng(0)
  slices = draw(rng, FOUR, each=1)
  typed = [
    x.astype(t)
    for x, t in zip(
      slices, (np.int8, np.uint32, np.uint8, np.int32), strict=True
    )
  ]

  def bits(dtype, rows, *trailing):
    size = np.dtype(dtype).itemsize
    words = rng.integers(0, 256, (4, rows, *trailing, size), np.uint8)
    if dtype == np.bool_:
      words &= 1
    return words.view(dtype)[..., 0]

  operands = [bits(dtype, N, H) for dtype in _DTYPES]
  operands += [bits(np.float32, N), bits(np.float16, N, 2, H)]

  def run(operands, typed):
    return [
      ep.lax.ragged_all_to_all(
        x, jnp.ones((M, *x.shape[1:]), x.dtype), *typed, axis_name=INNER
      )
      for x in operands
    ]

  actual = on_ranks(run, mesh)(*place(mesh, operands, typed))
  for got, x in zip(actual, operands, strict=True):
    ones = np.ones((4, M, *x.shape[2:]), x.dtype)
    expected = moved(x, ones, slices, FOUR)
    assert_shards_equal(got, expected, nan_bits=True)


# Bad values for a valid slice of four rows, from rank 1 to rank 2.
_BAD = {
  "input_offsets": [-1, N - 3, 2**31 - 1, -(2**31)],
  "send_sizes": [-1, 3, 5, 2**31 - 1, -(2**31)],
  "output_offsets": [-1, M - 3, 2**31 - 1, -(2**31)],
  "recv_sizes": [-1, 3, 5, 2**31 - 1],
}


def one_slice(**changes):
  """Returns slices of which only one has rows."""
  slices = Slices(*np.zeros((4, 4, 4), np.int32))
  slices.send_sizes[1, 2] = slices.recv_sizes[2, 1] = 4
  slices.input_offsets[1, 2], slices.output_offsets[1, 2] = 3, 2
  for name, value in changes.items():
    getattr(slices, name)[(2, 1) if name == "recv_sizes" else (1, 2)] = value
  return slices


def move(operand, output, slices, op=ep.lax.ragged_all_to_all):
  return op(operand, output, *slices, axis_name=INNER)


def two_arrays():
  rng = np.random.default_rng(0)
  return small(rng, 4, N, H), small(rng, 4, M, H)


def test_a_bad_slice_fails_on_every_rank(mesh):
  """The error names the slice's ranks and rows, and the next launch works."""
  operand, output = two_arrays()
  program = on_ranks(move, mesh)

  def run(slices):
    out = program(*place(mesh, operand, output, slices))
    return jax.block_until_ready(out)

  for change in (
    dict(input_offsets=N - 3),
    dict(output_offsets=-1),
    dict(recv_sizes=5),
  ):
    with pytest.raises(ep.EpError, match="rank 1 sends 4 rows to rank 2, from"):
      run(one_slice(**change))
  # A slice without rows may have offsets that are out of range.
  nowhere = dict(input_offsets=-1, output_offsets=2**31 - 1)
  empty = one_slice(**nowhere, send_sizes=0, recv_sizes=0)
  assert_shards_equal(run(empty), output)
  expected = moved(operand, output, one_slice(), FOUR)
  assert_shards_equal(run(one_slice()), expected)


def check_no_bad_slice_is_sent(run, operand, output):
  """Checks that `run` returns `output` unchanged for each bad slice."""
  expected = moved(operand, output, one_slice(), FOUR)
  assert_shards_equal(run(one_slice()), expected)
  for name, values in _BAD.items():
    for value in values:
      assert_shards_equal(run(one_slice(**{name: value})), output)


@of_one_process
def test_an_exported_program_sends_no_bad_slice(mesh):
  operand, output = two_arrays()
  args = place(mesh, operand, output, one_slice())
  exported = export.export(on_ranks(move, mesh))(*args)

  def run(slices):
    return exported.call(*args[:2], *place(mesh, slices))

  check_no_bad_slice_is_sent(run, operand, output)


def test_with_an_automatic_axis_no_bad_slice_is_sent():
  """The elements of rows are sharded over the automatic axis."""
  mesh = make_mesh({INNER: 4, OUTER: 2})
  program = on_ranks(move, mesh, axis_names={INNER})
  operand, output = (np.tile(x, 2) for x in two_arrays())
  args = (to_global(x, mesh, P(INNER, None, OUTER)) for x in (operand, output))
  run = functools.partial(program, *args)
  check_no_bad_slice_is_sent(run, operand, output)


@of_one_process
def test_elements_may_be_sharded_over_an_explicit_axis():
  """Result and gradients keep the operand's sharding, also after `install`."""
  mesh = make_mesh({INNER: 2, OUTER: 2}, (AxisType.Explicit,) * 2)
  groups, rng = [range(2)], np.random.default_rng(0)
  slices = draw(rng, groups)
  operand, output, ct = (small(rng, 2, rows, 4) for rows in (N, M, M))

  def run(operand, output, ct, slices):
    by_jax = move(operand, output, slices, lax.ragged_all_to_all)
    return by_jax, value_and_grads(operand, output, ct, slices)

  spec = P(INNER, None, OUTER)
  args = [to_global(x, mesh, spec) for x in (operand, output, ct)]
  args += [jax.tree.map(lambda x: to_global(x, mesh, P(INNER)), slices)]
  with ep.lax.install():
    actual = on_ranks(run, mesh, axis_names={INNER})(*args)
  assert {x.sharding.spec for x in jax.tree.leaves(actual)} == {spec}
  want = expected(operand, output, ct, slices, groups)
  jax.tree.map(assert_shards_equal, actual, (want[0], want))


@of_one_process
def test_install_is_for_code_of_others_and_can_be_undone(mesh):
  """JAX's op and its derivatives run on the CPU only after `install`."""
  operand, output = two_arrays()
  args = operand, output, output, one_slice()
  placed = place(mesh, *args)

  def of_operand(result):
    value, (ct, _) = result
    return value, ct

  @functools.partial(on_ranks, mesh=mesh)
  def run(*args):
    return of_operand(value_and_grads(*args, lax.ragged_all_to_all))

  def fails():
    with pytest.raises(ep.EpError, match="(?i)ragged.all.to.all"):
      jax.block_until_ready(run(*placed))

  fails()
  with ep.lax.install():
    with ep.lax.install():
      pass
    outs = run(*placed)
    compiled = run.lower(*placed).compile()
  fails()
  for actual in outs, compiled(*placed):
    jax.tree.map(assert_shards_equal, actual, of_operand(expected(*args)))


@of_one_process
def test_on_other_platforms_it_is_the_op_of_jax(mesh):
  """A TPU program has one ragged_all_to_all and no all-gather."""
  args = *two_arrays(), one_slice()
  traced = on_ranks(move, mesh).trace(*place(mesh, *args))
  text = traced.lower(lowering_platforms=("tpu",)).as_text()
  assert text.count("@ragged_all_to_all(") == 1
  assert "all_gather" not in text and "callback" not in text
