# SPDX-License-Identifier: Apache-2.0
"""A layer computes the same, however tokens get to their experts.

Numbers are whole and small: a wire rounds none of them.
"""

import dataclasses

import jax
import numpy as np
import pytest

import ep
from groups import BACKEND, E, GPU, group, K, of_one_process, T
from layer_steps import (
  assert_close,
  assert_same_bits,
  draw_params,
  in_slots,
  run_step,
)

HIDDEN, R = 128, 4
PLAIN = ep.MoEConfig(
  HIDDEN,
  8,
  E,
  K,
  activation=jax.nn.relu,
  biases=True,
  shared_inner=3,
  normalize=False,
)
PLACEMENT = ep.Placement(np.random.default_rng(7).permutation(E))
CHUNKS = dict(overflow="chunk", capacity_factor=1.0)

has_copies = pytest.mark.skipif(
  GPU and BACKEND != "xla", reason="no copies of nccl were seen on GPUs yet"
)


def results(mesh, view, placement=None, **options):
  config = dataclasses.replace(PLAIN, **options)
  rng = np.random.default_rng(0)

  def draw(shape):
    return rng.integers(-1, 2, shape)

  params = draw_params(PLAIN, draw)
  x, ct = draw((2, R * T, HIDDEN)).astype(np.float32)
  copies = (2 if mesh == "dp2_ep2" else 4) * config.replica_slots
  here = group(mesh, hidden_dim=HIDDEN, num_experts=E + copies)
  if placement is not None:
    params = in_slots(placement, params)
  y, metrics, grads, grad_x = run_step(
    ep.MoE(config, here), params, x, ct, view=view, placement=placement
  )
  if placement is not None:
    grads = in_slots(ep.Placement(placement.slots), grads)
  return y, metrics, grads, grad_x


def check(mesh, view, options):
  """Sums over the tokens of an expert may be rounded in another order."""
  y, metrics, grads, grad_x = results(mesh, view)
  got, got_metrics, got_grads, got_x = results(mesh, view, **options)
  rows, most = got_metrics.max_rank_rows, metrics.max_rank_rows
  metrics, got_metrics = (
    m._replace(max_rank_rows=None) for m in (metrics, got_metrics)
  )
  exact = (got, got_metrics, got_x), (y, metrics, grad_x)
  if GPU:
    assert_close(*exact, 1e-5, 1e-5)
  else:
    assert_same_bits(*exact)
  assert_close(got_grads, grads, 1e-5, 1e-4)
  assert rows < most or "replica_slots" not in options
  assert rows > T * K or "overflow" not in options


@pytest.mark.parametrize(
  "options",
  [
    pytest.param(dict(replica_slots=2), marks=has_copies),
    dict(token_chunks=2, wire="mxfp8"),
    CHUNKS,
    dict(overlap=False, wire="fp8_block128", placement=PLACEMENT),
  ],
)
def test_results_are_those_without_the_options(options):
  check("ep4", "global", options)


@of_one_process
@pytest.mark.parametrize(
  "options",
  [
    pytest.param(dict(replica_slots=1, placement=PLACEMENT), marks=has_copies),
    dict(token_chunks=99),
    dict(wire="mxfp8", **CHUNKS),
  ],
)
def test_results_of_two_domains_in_the_local_view(options):
  check("dp2_ep2", "local", options)
