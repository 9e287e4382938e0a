# SPDX-License-Identifier: Apache-2.0
"""Policies of drops, and moves to other candidates, are those of the reference.

A case is a layer and M candidates for each token. One program computes all
routings of a layer, in a `scan`.
"""

import dataclasses
import functools

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from cases import assert_same
from conftest import to_global
import ep
from ep._src.ops import reference
from ep.testing._routings import draw
from groups import BACKEND, E, failing, group, H, K, layer, ranks, spec
from op_functions import LocalOps, Moved, Ops, round_trip
from oracle import assigned, make_oracle
import quick_compiler

T = 12


def narrow_layer(mesh, rows_per_rank, backend=BACKEND, **options):
  """Returns a layer of a group for T tokens, with room for so many rows."""
  options = dict(overflow="drop") | options
  wide = group(mesh, max_tokens_per_rank=T, backend=backend)
  return ep.EpLayerConfig(wide, recv_capacity_per_rank=rows_per_rank, **options)


def draw_candidates(rng, kind, shape):
  """Returns int32 [N, M], with distinct experts for each token."""
  n, _ = shape
  if kind == "even":
    return (np.arange(n)[:, None] + np.arange(shape[1])).astype(np.int32) % E
  if kind == "idle":
    return np.full(shape, -1, np.int32)
  if kind == "one_expert":
    others = draw(rng, shape, np.arange(E) != E - 2)
    others[:, 0] = E - 2
    return others
  idx = draw(rng, shape, 2.0 ** -np.arange(E))
  if kind == "half":  # a domain, of two
    idx[: n // 2] = draw_candidates(rng, "even", shape)[: n // 2]
  if kind == "unused":
    idx[rng.random(shape) < 0.3] = -1
  return idx


def draw_weights(rng, kind, shape):
  """Returns float32 [N, M]."""
  if kind == "equal":
    return np.ones(shape, np.float32)
  if kind == "zeros":
    return np.where(rng.random(shape) < 0.5, 0.0, -0.0).astype(np.float32)
  if kind == "ties":
    return (rng.integers(-1, 3, shape) / 4).astype(np.float32)
  weights = rng.standard_normal(shape).astype(np.float32)
  if kind == "special":
    values = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0])
    weights = np.where(
      rng.random(shape) < 0.7, rng.choice(values, shape), weights
    )
  return weights.astype(np.float32)


ROUTINGS = [
  ("skewed", "distinct"),
  ("skewed", "equal"),
  ("skewed", "ties"),
  ("one_expert", "distinct"),
  ("one_expert", "special"),
  ("one_expert", "zeros"),
  ("half", "distinct"),
  ("unused", "ties"),
  ("even", "distinct"),
  ("idle", "distinct"),
]


class Case:
  """A layer with candidates, weights, and the oracle of each routing.

  All arrays have a leading axis of routings, and then the shapes of the global
  view.
  """

  def __init__(self, config, candidates, dtype=np.float32, routings=ROUTINGS):
    self.layer = config
    rng = np.random.default_rng(0)
    shape = ranks(config) * T, candidates
    self.ids, self.weights = map(
      np.stack,
      zip(
        *(
          (draw_candidates(rng, i, shape), draw_weights(rng, w, shape))
          for i, w in routings
        ),
        strict=True,
      ),
    )
    self.weights = self.weights.astype(dtype)
    n = len(routings)
    received = n, ranks(config), config.capacity
    self.tokens = rng.standard_normal((n, shape[0], H)).astype(np.float32)
    self.rows = rng.standard_normal((*received, H)).astype(np.float32)
    self.row_weights = rng.standard_normal(received).astype(np.float32)

  @property
  def arrays(self):
    return self.ids, self.weights, self.tokens, self.rows, self.row_weights

  def put(self, array):
    axes = PartitionSpec(None, *spec(self.layer))
    return to_global(array, self.layer.group.mesh, axes)

  def assigned(self, i):
    """Returns the reference's assignment [N, K] of routing i."""
    by_domain = assigned(self.layer, self.ids[i], self.weights[i])
    return np.concatenate(by_domain).reshape(-1, self.layer.top_k)

  def candidate(self, i):
    """Returns the candidate [N, K] that each choice uses."""
    own = np.arange(self.layer.top_k, dtype=np.int32)
    given = self.assigned(i)
    return np.where(given < 0, own, given)

  def expected(self):
    """Returns what `everything` returns, for each routing."""
    results = [self._expected(i) for i in range(len(self.ids))]
    return jax.tree.map(lambda *x: np.stack(x), *results)

  def _expected(self, i):
    oracle = make_oracle(self.layer, self.ids[i], self.weights[i])
    candidate = self.candidate(i)
    weights = np.take_along_axis(self.weights[i], candidate, axis=1)
    with np.errstate(all="ignore"):
      recv = oracle.dispatch(self.tokens[i], weights)
      g_tokens, g_weights = oracle.dispatch_bwd(
        (self.tokens[i], weights), (self.rows[i], self.row_weights[i])
      )
      out = oracle.combine(*recv)
    of_candidates = np.zeros_like(self.weights[i])
    np.put_along_axis(of_candidates, candidate, g_weights, axis=1)
    return dict(
      sizes=oracle.sizes(),
      candidate=candidate if self.ids.shape[-1] > K else None,
      dispatch=Moved(recv),
      combine=out,
      dispatch_bwd=(g_tokens, of_candidates),
    )


def everything(ops, weights, tokens, rows, row_weights):
  recv = ops.dispatch(tokens, weights)
  return dict(
    sizes=ops.sizes(),
    candidate=ops.handle.candidate,
    dispatch=Moved(recv),
    combine=ops.combine(*recv),
    dispatch_bwd=ops.dispatch_bwd((tokens, weights), (rows, row_weights)),
  )


def sizes(ops, weights):
  del weights
  return ops.sizes(), ops.handle.candidate


def run(case):
  """Returns `everything` of all routings, in one program of the local view."""

  def step(x):
    ids, weights, tokens, rows, row_weights = x
    ops = LocalOps(ep.ep_prepare(case.layer, ids, weights))
    return everything(ops, weights, tokens, rows, row_weights)

  specs = PartitionSpec(None, *spec(case.layer))
  program = jax.shard_map(
    functools.partial(lax.map, step),
    mesh=case.layer.group.mesh,
    in_specs=specs,
    out_specs=specs,
  )
  arrays = tuple(map(case.put, case.arrays))
  return jax.jit(program, compiler_options=quick_compiler.QUICK)(arrays)


@pytest.mark.parametrize(
  "mesh, drop_by, alignment, rows, candidates, dtype, backend",
  [
    ("ep4", None, 8, 40, K, jnp.bfloat16, BACKEND),
    ("ep4", "slot", 8, 32, K + 2, np.float32, BACKEND),
    ("dp2_ep2", "weight", 8, 32, K + 2, jnp.bfloat16, BACKEND),
    ("ep2_dp2", "fair", 1, 30, K + 2, np.float32, "xla"),
  ],
)
def test_policies(mesh, drop_by, alignment, rows, candidates, dtype, backend):
  config = narrow_layer(
    mesh,
    rows,
    backend,
    drop_by=drop_by,
    alignment=alignment,
    num_candidates=candidates,
  )
  case = Case(config, candidates, dtype)
  assert_same(run(case), case.expected())


def test_a_layer_with_candidates_is_that_of_what_they_became():
  """Output and gradients are those of a routing with the final choices."""
  config = narrow_layer("ep4", 16, drop_by="weight", num_candidates=K + 1)
  case = Case(config, K + 1, routings=ROUTINGS[:1])
  ids, weights, tokens = (x[0] for x in case.arrays[:3])
  candidate = case.candidate(0)
  final = np.take_along_axis(ids, candidate, axis=1)
  final = np.where(case.assigned(0) < 0, -1, final).astype(np.int32)
  wide = ep.EpLayerConfig(config.group)
  rng = np.random.default_rng(1)
  matrices = dict(
    w_up=rng.standard_normal((E, H, 4)).astype(np.float32),
    w_down=rng.standard_normal((E, 4, H)).astype(np.float32),
  )
  axis = PartitionSpec(config.group.axis_name)
  experts = {
    n: to_global(x, wide.group.mesh, axis) for n, x in matrices.items()
  }

  def grads(layer, experts, ids, candidate, tokens, weights):
    def loss(tokens, weights):
      if candidate is not None:
        weights = jnp.take_along_axis(weights, candidate, axis=1)
      out, handle = ep.moe_layer(
        layer, tokens, ids, weights, **experts, return_handle=True
      )
      return jnp.sin(out).sum(), (out, handle.kept)

    return jax.grad(loss, argnums=(0, 1), has_aux=True)(tokens, weights)

  @functools.partial(jax.jit, compiler_options=quick_compiler.QUICK)
  def both(experts, ids, final, candidate, *args):
    return (
      grads(config, experts, ids, None, *args),
      grads(wide, experts, final, candidate, *args),
    )

  args = [put(config, x) for x in (ids, final, candidate, tokens, weights)]
  moved, expected = both(experts, *args)
  for a, b in zip(*map(jax.tree.leaves, (moved, expected)), strict=True):
    for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
      np.testing.assert_allclose(x.data, y.data, rtol=1e-5, atol=1e-5)


# The example of docs/semantics.md: tokens A to F, and what each one gets.
EXAMPLE = np.array([[[0, 2], [0, 1], [0, 3]], [[0, 2], [1, 3], [2, 0]]])
WEIGHTS = np.array([[[9, 1], [5, 4], [4, 3]], [[7, 2], [2, 1], [6, 3]]]) / 10


@pytest.mark.parametrize(
  "drop_by, kept, moved",
  [("slot", "ABF", "D"), ("weight", "ADF", "C"), ("fair", "AEF", "C")],
)
def test_the_worked_example(drop_by, kept, moved):
  """The reference has these results, which were found by hand."""
  for candidates, also in (1, ""), (2, moved):
    assigned = reference.assign(
      EXAMPLE[..., :candidates],
      WEIGHTS[..., :candidates],
      top_k=1,
      num_experts=4,
      capacity=2,
      drop_by=drop_by,
    )
    for token, got in zip("ABCDEF", assigned.flat, strict=True):
      assert got == (0 if token in kept else 1 if token in also else -1)


@functools.cache
def global_program(config, fn):
  """Returns a jitted function of ids, weights and arrays in the global view."""

  def call(ids, weights, *arrays):
    return fn(Ops(ep.ep_prepare(config, ids, weights)), weights, *arrays)

  return jax.jit(call, compiler_options=quick_compiler.QUICK)


def put(config, array):
  return to_global(array, config.group.mesh, spec(config))


@pytest.fixture(scope="module")
def spilling():
  return narrow_layer("ep4", 16, drop_by="fair", num_candidates=K + 1)


def test_global_view(spilling):
  case = Case(spilling, K + 1, routings=ROUTINGS[:1])
  program = global_program(spilling, everything)
  actual = program(*(put(spilling, x[0]) for x in case.arrays))
  assert_same(actual, jax.tree.map(lambda x: x[0], case.expected()))


def test_vmap_is_one_exchange_for_each_example(spilling):
  case = Case(spilling, K + 1, routings=ROUTINGS[:2])
  program = jax.jit(
    jax.vmap(global_program(spilling, sizes).__wrapped__),
    compiler_options=quick_compiler.QUICK,
  )
  expected = case.expected()
  assert_same(
    program(case.put(case.ids), case.put(case.weights)),
    (expected["sizes"], expected["candidate"]),
  )


def test_no_tokens(spilling):
  config = spilling
  ids = put(config, np.zeros((0, K + 1), np.int32))
  handle = ep.ep_prepare(config, ids, put(config, np.zeros((0, K + 1))))
  assert handle.candidate.shape == (0, K)


@pytest.mark.parametrize("is_saved", [False, True])
def test_the_routing_of_a_checkpointed_block(spilling, is_saved):
  """It is exchanged once, and once more if rows are short."""
  case = Case(spilling, K + 1, routings=ROUTINGS[:1])
  policy = jax.checkpoint_policies.save_only_these_names("ep_routing")

  def loss(tokens, ids, weights):
    @functools.partial(jax.checkpoint, policy=policy if is_saved else None)
    def block(tokens):
      ops = Ops(ep.ep_prepare(spilling, ids, weights))
      rows, gates = ops.dispatch(tokens, weights)
      return ops.combine(jnp.sin(rows), gates)

    return block(tokens).sum()

  step = jax.jit(jax.value_and_grad(loss))
  args = (put(spilling, x[0]) for x in (case.tokens, case.ids, case.weights))
  prepares = step.lower(*args).as_text().count("custom_call @ep_prepare(")
  assert prepares == (2 if is_saved else 4)


def test_a_capacity_for_any_routing_needs_no_exchange():
  wide = ep.EpLayerConfig(
    group("ep4", max_tokens_per_rank=T), overflow="drop", drop_by="fair"
  )
  ids = jax.ShapeDtypeStruct((4 * T, K), jnp.int32)
  weights = jax.ShapeDtypeStruct((4 * T, K), jnp.float32)
  prepare = jax.make_jaxpr(functools.partial(ep.ep_prepare, wide))
  assert "ep_assign" not in str(prepare(ids, weights))
  slots = ep.EpLayerConfig(
    wide.group, overflow="drop", recv_capacity_per_rank=8
  )
  prepare = jax.make_jaxpr(functools.partial(ep.ep_prepare, slots))
  assert "ep_assign" not in str(prepare(ids))


def crowded(config, candidates, **changes):
  """Returns ids that overflow, with some of them changed, and weights."""
  case = Case(config, candidates, routings=[("one_expert", "distinct")])
  ids = case.ids[0].copy()
  for at, value in changes.items():
    row, column = map(int, at.strip("_").split("_"))
    ids[row, column] = value
  return put(config, ids), put(config, case.weights[0])


@pytest.mark.parametrize(
  "changes, words",
  [
    ({"_13_1": E}, ["topk_idx[1, 1] = 8", "rank 1"]),
    ({"_2_0": 0, "_2_1": 1, "_2_2": 0}, ["topk_idx[2, 2] = 0 repeats"]),
    ({"_2_3": -2}, ["topk_idx[2, 2] = -2", "rank 0"]),
  ],
)
def test_wrong_ids_are_reported_on_every_rank(spilling, changes, words):
  """Although choices are dropped, and perhaps the wrong one."""
  program = global_program(spilling, sizes)
  with failing(spilling.group) as error:
    out = program(*crowded(spilling, K + 1, **changes))
    jax.block_until_ready(out)
  for word in words:
    assert word in str(error.value)


def test_moves_can_prevent_the_error_of_an_overflow():
  """48 tokens choose expert 0, and each rank has 12 rows, or 11.

  The handle serves all ops, whether choices moved or not.
  """
  ids = np.tile(np.arange(E, dtype=np.int32), (4 * T, 1))
  options = dict(overflow="error", top_k=1, num_candidates=E)
  config = narrow_layer("ep4", 12, **options)

  def exchange(ops, _, tokens, weights):
    return ops.handle.candidate, round_trip(ops, tokens, weights)

  program = global_program(config, exchange)
  tokens = np.ones((4 * T, H), np.float32)
  arrays = None, *(put(config, x) for x in (tokens, tokens[:, :1]))
  candidates = np.repeat(np.arange(4, dtype=np.int32) * 2, T)[:, None]
  for moved in True, False:
    choices = ids if moved else (ids + candidates) % E
    expected = moved * candidates, tokens
    assert_same(program(put(config, choices), *arrays), expected)
  full = narrow_layer("ep4", 11, **options, name="full")
  program = global_program(full, sizes)
  with failing(full.group) as error:
    jax.block_until_ready(program(put(full, ids), None))
  for word in ["full", "15", "11", "capacity"]:
    assert word in str(error.value)


@pytest.mark.parametrize(
  "make, words",
  [
    (dict(drop_by="first"), ["drop_by", "first", "weight", "fair"]),
    (dict(drop_by="fair", overflow="error"), ["drop_by", 'overflow="drop"']),
    (dict(num_candidates=K - 1), ["num_candidates", "3..8"]),
    (dict(num_candidates=E + 1), ["num_candidates", "3..8"]),
  ],
)
def test_layers_that_cannot_be(make, words):
  with pytest.raises(ValueError) as error:
    layer(**make)
  for word in words:
    assert word in str(error.value)


def test_weights_that_do_not_fit_are_refused(spilling):
  ids = jnp.zeros((4 * T, K + 1), jnp.int32)
  weights = jnp.zeros((4 * T, K + 1))

  def refuse(fn, *words):
    with pytest.raises((ValueError, TypeError)) as error:
      jax.eval_shape(fn)
    for word in words:
      assert word in str(error.value)

  prepare = functools.partial(ep.ep_prepare, spilling)
  refuse(lambda: prepare(ids), "topk_weights is None", "fair")
  refuse(lambda: prepare(ids, weights[:, 1:]), "topk_weights", "(48, 3)")
  refuse(lambda: prepare(ids, ids), "int32", "floating")
  refuse(lambda: prepare(ids[:, 2:], weights[:, 2:]), "top_k", "num_candidates")

  def dispatch(columns, routed):
    handle = prepare(ids[:, :routed], weights[:, :routed])
    return ep.ep_dispatch(handle, jnp.zeros((4 * T, H)), weights[:, :columns])

  refuse(lambda: dispatch(2, K + 1), "topk_weights", "(48, 2)", "candidate")
  refuse(lambda: dispatch(K + 1, K), "topk_weights", "(48, 4)")


def test_a_layer_of_chunks_is_no_layer_of_an_op():
  chunks = layer(overflow="chunk", recv_capacity_per_rank=16)
  with pytest.raises(ValueError, match='ep_prepare.*"chunk".*ep.MoE'):
    ep.ep_prepare(chunks, jnp.zeros((4 * T, K), jnp.int32))


def test_layers_of_other_names_share_the_assignment(spilling):
  """A program has it once, and its length does not grow with its layers."""
  layers = [dataclasses.replace(spilling, name=f"{i}") for i in range(3)]

  def call(ids, weights):
    return [ep.ep_prepare(layer, ids, weights) for layer in layers]

  case = Case(spilling, K + 1, routings=ROUTINGS[:1])
  args = [put(spilling, x[0]) for x in case.arrays[:2]]
  text = jax.jit(call).lower(*args).as_text()
  assert text.count("call @_assign(") == 3
  assert text.count("func.func private @_assign(") == 1


def test_its_collectives_are_no_hidden_ones(spilling):
  """The check knows these, and goes on seeing others."""
  case = Case(spilling, K + 1, routings=ROUTINGS[:1])
  program = global_program(spilling, sizes)
  args = [put(spilling, x[0]) for x in case.arrays[:2]]
  compiled = program.lower(*args).compile()
  assert "all-gather" in compiled.as_text()
  ep.assert_no_hidden_collectives(compiled)
  without = (
    compiled.as_text().replace("ep_assign", "x").replace("ep_prepare", "x")
  )
  with pytest.raises(AssertionError, match="all-gather"):
    ep.assert_no_hidden_collectives(without)
