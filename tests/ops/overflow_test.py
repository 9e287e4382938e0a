# SPDX-License-Identifier: Apache-2.0
"""Rows beyond a rank's capacity raise an error, or the op drops rows.

The drop policies choose the rows that the reference chooses.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import assert_same, Case, global_view, local_view, lower
import ep
from ep._src.ops import reference
from ep.testing._routings import ROUTINGS
from groups import BACKEND, E, group, K, of_one_process, ranks
from op_functions import Moved, Ops, sizes

T = 12


def narrow_layer(mesh, rows_per_rank, backend=BACKEND, **options):
  """Returns a layer for T tokens per rank, with capacity `rows_per_rank`."""
  options = dict(overflow="drop") | options
  wide = group(mesh, max_tokens_per_rank=T, backend=backend)
  return ep.EpLayerConfig(wide, recv_capacity_per_rank=rows_per_rank, **options)


def draw_weights(rng, kind, shape):
  """Draws float32 weights [N, K]."""
  special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0])
  values = {
    "equal": [1.0],
    "zeros": [0.0, -0.0],
    "ties": [-0.25, 0.0, 0.25, 0.5],
    "special": special,
  }
  if kind == "distinct":
    return rng.standard_normal(shape).astype(np.float32)
  return rng.choice(values[kind], shape).astype(np.float32)


KINDS = [
  ("skewed", "distinct"),
  ("skewed", "ties"),
  ("skewed", "special"),
  ("skewed", "zeros"),
  ("to_one_expert", "distinct"),
  ("idle_rank", "special"),
  ("with_unused_choices", "ties"),
  ("balanced", "distinct"),
  ("idle", "distinct"),
]


def cases_of(config, dtype=np.float32):
  rng = np.random.default_rng(0)
  shape = ranks(config) * T, K
  for kind, kind_of_weights in KINDS:
    ids = ROUTINGS[kind](rng, shape, E).astype(np.int32)
    weights = draw_weights(rng, kind_of_weights, shape).astype(dtype)
    yield Case(config, ids, lead=(T,), routing_weights=weights)


def everything(ops, weights, tokens, rows, row_weights):
  recv = ops.dispatch(tokens, weights)
  return dict(
    sizes=ops.sizes(),
    dispatch=Moved(recv),
    combine=ops.combine(*recv),
    dispatch_bwd=ops.dispatch_bwd((tokens, weights), (rows, row_weights)),
  )


@pytest.mark.parametrize(
  "mesh, drop_by, rows, view",
  [
    ("dp2_ep2", "fair", 32, local_view),
    ("ep4", None, 40, global_view),
    ("dp2_ep2", "slot", 32, global_view),
  ],
)
def test_policies(mesh, drop_by, rows, view):
  options = dict(drop_by=drop_by, alignment=8)
  for case in cases_of(narrow_layer(mesh, rows, **options), jnp.bfloat16):
    _, weights = case.routing
    inputs = weights, case.tokens(), case.rows(), case.row_weights()
    with np.errstate(all="ignore"):
      expected = everything(case.oracle, *inputs)
    assert_same(case.run(everything, *inputs, view=view), expected)


# The example of docs/semantics.md: the experts and weights of tokens A to F.
EXAMPLE = np.array([[[0], [0], [0]], [[0], [1], [2]]])
WEIGHTS = np.array([[[9], [5], [4]], [[7], [2], [6]]]) / 10


@pytest.mark.parametrize("drop_by, kept", [("slot", "ABF"), ("fair", "AEF")])
def test_the_worked_example(drop_by, kept):
  """The expected results were worked out by hand."""
  is_kept = reference.assign(
    EXAMPLE, WEIGHTS, num_experts=4, capacity=2, drop_by=drop_by
  )
  names = zip("ABCDEF", is_kept.flat, strict=True)
  assert "".join(name for name, is_kept in names if is_kept) == kept


@pytest.fixture(scope="module")
def short():
  """Returns a case whose layer has too small a capacity."""
  config = narrow_layer("ep4", 16, drop_by="fair")
  return next(cases_of(config))


@of_one_process
def test_the_routing_of_a_checkpointed_block_is_exchanged_once(short):
  """The capacity is short, so the routing needs two exchanges."""

  def loss(tokens, ids, weights):
    @jax.checkpoint
    def block(tokens):
      ops = Ops(ep.ep_prepare(short.layer, ids, weights))
      rows, gates = ops.dispatch(tokens, weights)
      return ops.combine(jnp.sin(rows), gates)

    return block(tokens).sum()

  step = jax.jit(jax.value_and_grad(loss))
  args = map(short.put, (short.tokens(), *short.routing))
  assert step.lower(*args).as_text().count("custom_call @ep_prepare(") == 2


@of_one_process
def test_a_capacity_for_any_routing_needs_no_exchange():
  wide = ep.EpLayerConfig(
    group("ep4", max_tokens_per_rank=T), overflow="drop", drop_by="fair"
  )
  ids = jax.ShapeDtypeStruct((4 * T, K), jnp.int32)
  weights = jax.ShapeDtypeStruct((4 * T, K), jnp.float32)
  prepare = jax.make_jaxpr(functools.partial(ep.ep_prepare, wide))
  assert "ep_assign" not in str(prepare(ids, weights))


@pytest.mark.parametrize(
  "changes, words",
  [
    ({(13, 1): E}, ["topk_idx[1, 1] = 8", "rank 1"]),
    ({(2, 0): 0, (2, 1): 1, (2, 2): 0}, ["topk_idx[2, 2] = 0 repeats"]),
  ],
)
def test_wrong_ids_are_reported_on_every_rank(short, changes, words):
  """A wrong id is an error even if the policy would drop its choice."""
  ids, weights = short.routing
  ids = ids.copy()
  for at, value in changes.items():
    ids[at] = value
  case = Case(short.layer, ids, lead=(T,), routing_weights=weights)
  case.check_error(words, sizes)


@of_one_process
def test_the_collectives_of_a_policy_are_not_hidden(short):
  """The check for hidden collectives allows only those of drop policies."""
  compiled = lower((short, sizes)).compile()
  assert "all-gather" in compiled.as_text()
  ep.assert_no_hidden_collectives(compiled)
  without = (
    compiled.as_text().replace("ep_assign", "x").replace("ep_prepare", "x")
  )
  with pytest.raises(AssertionError, match="all-gather"):
    ep.assert_no_hidden_collectives(without)
