# SPDX-License-Identifier: Apache-2.0
"""A layer gives the same results for each way to send tokens to experts.

The numbers are small and whole, so fp8 rows represent them exactly.
"""

import dataclasses

import jax
from jax import lax
import numpy as np
import pytest

import ep
from groups import E, failing, GPU, group, K, of_one_process, T
from layer_steps import (
  assert_close,
  assert_same_bits,
  draw_params,
  in_slots,
  run_forward,
  run_step,
)

HIDDEN, R = 32, 4
PLAIN = ep.MoEConfig(
  HIDDEN,
  6,
  E,
  K,
  activation=jax.nn.relu,
  biases=True,
  shared_inner=4,
  normalize=False,
)
PLACEMENT = ep.Placement(np.random.default_rng(7).permutation(E))


def layer_of(mesh="ep4", **options):
  config = dataclasses.replace(PLAIN, **options)
  return ep.MoE(config, group(mesh, hidden_dim=HIDDEN))


def results(layer, placement=None):
  rng = np.random.default_rng(0)

  def draw(shape):
    return rng.integers(-1, 2, shape)

  params = draw_params(PLAIN, draw)
  x, ct = draw((2, R * T, HIDDEN)).astype(np.float32)
  if placement is not None:
    params = in_slots(placement, params)
  y, metrics, grads, grad_x = run_step(
    layer, params, x, ct, placement=placement
  )
  if placement is not None:
    grads = in_slots(ep.Placement(placement.slots), grads)
  return y, metrics, grads, grad_x


@pytest.mark.parametrize(
  "mesh, placement, options",
  [
    ("ep2_dp2", PLACEMENT, dict(weigh="input")),
    pytest.param(
      "ep4",
      None,
      dict(weigh="input", token_chunks=99, wire="mxfp8"),
      marks=of_one_process,
    ),
    (
      "ep2_dp2",
      None,
      dict(weigh="input", wire="mxfp8", overflow="chunk", capacity_factor=1.0),
    ),
    pytest.param("ep4", PLACEMENT, dict(overlap=False), marks=of_one_process),
  ],
)
def test_results_equal_a_layer_without_options_on_one_domain(
  mesh, placement, options
):
  """Only gradients of matrices may differ, by rounding errors of a sum.

  `weigh` changes results, so both layers have the same `weigh`. Other tests
  combine these options with weigh="late".
  """
  weigh = options.get("weigh", "late")
  y, metrics, grads, grad_x = results(layer_of(weigh=weigh))
  got, got_metrics, got_grads, got_x = results(
    layer_of(mesh, **options), placement
  )
  rows = got_metrics.max_rank_rows
  metrics, got_metrics = (
    m._replace(max_rank_rows=None) for m in (metrics, got_metrics)
  )
  exact = (got, got_metrics, got_x), (y, metrics, grad_x)
  if GPU:
    assert_close(*exact, 1e-5, 1e-5)
  else:
    assert_same_bits(*exact)
  assert_close(got_grads, grads, 1e-5, 1e-4)
  assert rows > T * K or "overflow" not in options


@of_one_process
def test_results_are_close_with_another_grouped_matmul():
  got = results(layer_of(implementation=lax.ragged_dot))
  assert_close(got, results(layer_of()), 1e-5, 1e-4)


@pytest.mark.parametrize(
  "placement, options",
  [
    (PLACEMENT, {}),
    (PLACEMENT, dict(token_chunks=T)),
  ],
)
def test_errors_name_wrong_choices_as_the_caller_wrote_them(placement, options):
  """Errors name neither the slot of an expert nor the token of a chunk."""
  layer = layer_of(**options)
  params = draw_params(PLAIN, np.zeros)
  x = np.zeros((R * T, HIDDEN), np.float32)
  idx = np.tile(np.arange(K, dtype=np.int32), (R * T, 1))
  run_forward(layer, params, x, idx, placement=placement)
  for choices, fault in [
    ([3, 2, 3], "topk_idx[3, 2] = 3 repeats an expert of token 3;"),
    ([1, 1, 0], "topk_idx[3, 1] = 1 repeats an expert of token 3;"),
    ([0, E, 1], "topk_idx[3, 1] = 8, but num_experts = 8;"),
    ([-2, 0, 0], "topk_idx[3, 0] = -2, but num_experts = 8;"),
  ]:
    wrong = idx.copy()
    wrong[2 * T + 3] = choices
    with failing(layer.group) as error:
      run_forward(layer, params, x, wrong, placement=placement)
    assert f'ep_prepare(layer "moe"), rank 2: {fault}' in str(error.value)
