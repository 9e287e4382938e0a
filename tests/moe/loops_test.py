# SPDX-License-Identifier: Apache-2.0
"""A layer puts no XLA collective into a loop or a branch around its ops.

XLA:CPU would not order such a collective with collectives outside the loop; see
ep/_tools/collectives/unordered.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import make_mesh, TIMEOUT_S
import ep
from ep._tools.collectives.unordered import loops_with_collectives
from groups import BACKEND
from layer_steps import draw_params, put, whole

HIDDEN, E, K, T = 32, 8, 2, 16
PLAIN = ep.MoEConfig(HIDDEN, 16, E, K, biases=True, shared_inner=8)
TIGHT = dict(capacity_factor=1.0)
CHUNK = dict(overflow="chunk", **TIGHT)
FAIR = dict(overflow="drop", drop_by="fair", **TIGHT)
SMALL, LARGE = {"dp": 2, "ep": 2}, {"dp": 2, "fsdp": 2, "ep": 2}


@pytest.mark.parametrize(
  "mesh, options",
  [
    (SMALL, dict(balance="sequence", score="sigmoid", overlap=False)),
    (SMALL, dict(deterministic=True)),
    (SMALL, CHUNK),
    (SMALL, dict(token_chunks=2, wire="mxfp8", **FAIR)),
    (LARGE, {}),
    (LARGE, dict(token_chunks=4)),
    (LARGE, CHUNK),
  ],
  ids=str,
)
def test_launches_of_a_step_agree(mesh, options):
  """All launches of one program give the same bits."""
  fsdp = "fsdp" if "fsdp" in mesh else None
  config = dataclasses.replace(PLAIN, fsdp_axis=fsdp, **options)
  layer = ep.MoE(
    config,
    make_mesh(mesh),
    max_tokens_per_rank=T,
    timeout_s=TIMEOUT_S,
    backend=BACKEND,
  )
  rng = np.random.default_rng(0)
  params = draw_params(config, lambda shape: rng.normal(size=shape) / 9)
  x = rng.normal(size=(layer.group.mesh.size, T, HIDDEN)).astype(np.float32)

  @jax.jit
  def step(params, x, state):
    def loss(params, x):
      y, metrics = layer(params, x, state)
      losses = metrics.aux_loss + metrics.z_loss + jnp.mean(y**2)
      return losses, (y, metrics, state.after(metrics.load))

    return jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)

  args = *put(layer, params, x), layer.init_state()
  program = step.lower(*args).compile()
  if BACKEND != "xla":
    assert loops_with_collectives(program) == []
  first = whole(program(*args))
  for _ in range(20):
    jax.tree.map(np.testing.assert_array_equal, whole(program(*args)), first)
