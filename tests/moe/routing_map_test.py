# SPDX-License-Identifier: Apache-2.0
"""topk_from_map returns the choices and weights of a dense routing map."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
import numpy as np
import pytest

from cases import global_view, local_view
from conftest import assert_shards_equal, to_global
import ep
from groups import E, failing, K, layer, of_one_process, spec, T
from op_functions import sizes


def dense(lead, seed=0):
  """Draws a map of at most K experts per token, and its probabilities.

  The probabilities of other experts are NaN.
  """
  rng = np.random.default_rng(seed)
  experts = rng.random((*lead, E)).argsort(-1)
  routing_map = experts < rng.integers(0, K + 1, (*lead, 1))
  probs = np.where(routing_map, rng.random((*lead, E)), np.nan)
  return routing_map, probs.astype(np.float32)


def by_hand(routing_map, probs):
  idx = np.full((*routing_map.shape[:-1], K), -1, np.int32)
  weights = np.zeros(idx.shape, np.float32)
  for row in np.ndindex(idx.shape[:-1]):
    (experts,) = np.nonzero(routing_map[row])
    idx[row][: len(experts)] = experts
    weights[row][: len(experts)] = probs[row][experts]
  return idx, weights


@pytest.mark.parametrize(
  "axis_type",
  [AxisType.Auto, pytest.param(AxisType.Explicit, marks=of_one_process)],
  ids=lambda t: t.name,
)
def test_choices_and_gradients_agree_with_the_map(axis_type):
  """Results are sharded like the map, without communication between ranks."""
  a_layer = layer("dp2_ep2", axis_type)
  mesh, sharded = a_layer.group.mesh, spec(a_layer)
  lead = 4 * T, 2
  routing_map, probs = dense(lead)
  scale = np.random.default_rng(1).random((*lead, K)).astype(np.float32)

  def fn(routing_map, probs, scale):
    def weigh(probs):
      idx, weights = ep.topk_from_map(routing_map, probs, K)
      return (weights * scale).sum(), (idx, weights)

    return jax.grad(weigh, has_aux=True)(probs)

  args = [to_global(x, mesh, sharded) for x in (routing_map, probs, scale)]
  with jax.set_mesh(mesh):
    program = jax.jit(fn).lower(*args).compile()
  gradient, (idx, weights) = program(*args)
  ep.assert_no_hidden_collectives(program, allow=["all-reduce"])
  expected = by_hand(routing_map, probs)
  assert_shards_equal(idx, expected[0])
  assert_shards_equal(weights, expected[1])
  expected_gradient = np.zeros_like(probs)
  for row in np.ndindex(lead):
    n = routing_map[row].sum()
    expected_gradient[row][expected[0][row][:n]] = scale[row][:n]
  assert_shards_equal(gradient, expected_gradient)
  for array in idx, weights, gradient:
    assert array.sharding.is_equivalent_to(args[0].sharding, 3)


@of_one_process
def test_a_row_with_too_many_experts():
  """An eager call names the row. Otherwise ep_prepare raises the error."""
  a_layer = layer()
  routing_map, probs = dense((4 * T,))
  row = 2 * T + 1
  routing_map[row] = np.arange(E) < K + 2
  message = rf"routing_map\[{row}\] marks {K + 2} experts, \[0, 1, 2, 3, 4\]"
  with pytest.raises(ValueError, match=message):
    ep.topk_from_map(routing_map, probs, K)

  def choose(routing_map, probs):
    return ep.topk_from_map(routing_map, probs, K)

  args = [
    to_global(x, a_layer.group.mesh, spec(a_layer))
    for x in (routing_map, probs)
  ]
  idx, weights = jax.jit(choose)(*args)
  expected = by_hand(*dense((4 * T,)))
  expected[0][row], expected[1][row] = -(K + 2), np.nan
  assert_shards_equal(idx, expected[0])
  assert_shards_equal(weights, expected[1])
  for view in global_view, local_view:
    with failing(a_layer.group) as error:
      jax.block_until_ready(jax.jit(view(a_layer, sizes))(idx))
    assert ", rank 2" in str(error.value)
    assert f": topk_idx[1, 0] = -{K + 2}, but" in str(error.value)


def test_a_map_of_one_expert_gives_no_warning(recwarn):
  ep.topk_from_map(np.eye(E, dtype=bool), np.eye(E, dtype=np.float32), 1)
  assert not recwarn.list


def test_bad_arguments():
  good = np.zeros((4, E), bool), np.zeros((4, E), jnp.bfloat16), K
  _, weights = jax.eval_shape(lambda: ep.topk_from_map(*good))
  assert weights.dtype == jnp.float32
  for index, value, error, words in [
    (0, good[0].astype(int), TypeError, "routing_map is int32, but a map of"),
    (1, good[0], TypeError, "probs is bool, but a float"),
    (1, good[1][1:], ValueError, r"routing_map has shape \(4, 8\) and probs"),
    (2, E + 1, ValueError, "top_k = 9, but maps of shape"),
    (2, 2.5, TypeError, "top_k = 2.5 is a float"),
  ]:
    args = [*good]
    args[index] = value
    with pytest.raises(error, match="topk_from_map: " + words):
      ep.topk_from_map(*args)
