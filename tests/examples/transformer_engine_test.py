# SPDX-License-Identifier: Apache-2.0
"""The recipe for TransformerEngine computes what TransformerEngine would.

A dense float64 model follows TransformerEngine's contract: the order in which
experts are chosen, their weights, and what those multiply. For
TransformerEngine's own tests, see docs/howto/replace.md.
"""

import importlib
import pathlib
import sys

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from conftest import make_mesh, refused, to_global
from ep import assert_no_hidden_collectives
from recipes import transformer_engine
from recipes.transformer_engine.common import recipe
from recipes.transformer_engine.jax import dense, ep, moe, quantize, sharding

B, S, H, F, E, K = 8, 6, 12, 8, 8, 4
TOKENS = B * S // 4  # of a rank
SIZES = dict(num_experts=E, num_experts_per_tok=K)
CAPACITY = moe.get_moe_recv_capacity_per_rank(
  **SIZES, max_tokens_per_rank=TOKENS, ep_size=2
)
SHAPES = dict(
  x=(B, S, H),
  gate_kernel=(H, E),
  wi=(E, H, 2 * F),
  wo=(E, F, H),
  wi_0_bias=(E, F),
  wi_1_bias=(E, F),
  wo_bias=(E, H),
  expert_bias=(E,),
)


@pytest.fixture
def ranks():
  mesh = make_mesh({"fsdp": 2, "ep": 2})
  resource = sharding.MeshResource(fsdp_resource="fsdp", ep_resource="ep")
  sizes = dict(max_tokens_per_rank=TOKENS, recv_capacity_per_rank=CAPACITY)
  with jax.set_mesh(mesh), sharding.global_shard_guard(resource):
    ep.ep_bootstrap(4, None, E, hidden_dim=H, **sizes)
  yield
  ep.ep_finalize()


def draw():
  rng = np.random.default_rng(0)
  return {n: rng.standard_normal(s, np.float32) / 3 for n, s in SHAPES.items()}


def run_moe(params, **options):
  sizes = SIZES | dict(ep_axis="ep", data_parallelism_axes=("fsdp",))
  return moe.moe(**params, **sizes | options)


def is_best(values, n):
  """Returns which entries are the n largest; of equals, the first."""
  order = jnp.argsort(-values, axis=-1, stable=True)
  return order.argsort(axis=-1) < n


def dense_moe(
  p,
  *,
  score_function="softmax",
  use_pre_softmax=False,
  scaling_factor=1.0,
  aux_loss_coeff=0.0,
  apply_topk_weights_early=False,
  num_experts_per_tok=K,
  num_groups=1,
  group_topk=None,
):
  """Returns the output, the loss, and the chosen experts, bool [B, S, E]."""
  k = num_experts_per_tok
  logits = p["x"] @ p["gate_kernel"]
  scores = {
    "softmax": jax.nn.softmax,
    "sigmoid": jax.nn.sigmoid,
    "sqrtsoftplus": lambda x: jax.nn.softplus(x) ** 0.5,
  }[score_function](logits)
  if score_function != "softmax":
    order = scores + p["expert_bias"]
  else:  # sums of logits order groups otherwise than sums of scores
    order = scores if use_pre_softmax else logits
  if group_topk:
    groups = order.reshape(B, S, num_groups, -1)
    sums = jnp.sort(groups)[..., -(k // group_topk) :].sum(-1)
    is_open = is_best(sums, group_topk)[..., None]
    order = jnp.where(is_open, groups, -jnp.inf).reshape(order.shape)
  chosen = is_best(lax.stop_gradient(order), k)
  weights = scores * chosen
  if not use_pre_softmax and (k > 1 or score_function == "softmax"):
    weights /= weights.sum(-1, keepdims=True)
  weights *= scaling_factor
  gate, up = jnp.split(jnp.einsum("bsh,ehf->bsef", p["x"], p["wi"]), 2, axis=-1)
  hidden = jax.nn.silu(gate + p["wi_0_bias"]) * (up + p["wi_1_bias"])
  y = jnp.einsum("bsef,efh,bse->bsh", hidden, p["wo"], weights)
  # Early weights multiply hidden activations only.
  y += (chosen * 1.0 if apply_topk_weights_early else weights) @ p["wo_bias"]
  if k > 1:
    scores /= scores.sum(-1, keepdims=True)
  load = chosen.mean((0, 1)) * scores.mean((0, 1))
  return y, aux_loss_coeff * E / k * load.sum(), chosen


def loss(function, p, options):
  y, aux_loss, *others = function(p, **options)
  return jnp.sin(y).sum() + (0 if aux_loss is None else aux_loss), others


@pytest.mark.parametrize(
  "options",
  [
    dict(aux_loss_coeff=3.0),
    dict(apply_topk_weights_early=True, scaling_factor=2.5),
    dict(num_groups=4, group_topk=2),
    dict(num_groups=4, group_topk=2, use_pre_softmax=True),
    dict(score_function="sigmoid", num_groups=2, group_topk=1),
    dict(score_function="sigmoid", num_experts_per_tok=1, aux_loss_coeff=3.0),
    dict(score_function="sqrtsoftplus", aux_loss_coeff=3.0, scaling_factor=0.5),
  ],
  ids=lambda options: "-".join(f"{v}" for v in options.values()),
)
def test_moe_is_a_dense_model(ranks, options):
  run = jax.jit(
    jax.value_and_grad(lambda p: loss(run_moe, p, options), has_aux=True)
  )
  (value, (total,)), grads = run(draw())
  with jax.enable_x64(True):
    params = {n: x.astype(np.float64) for n, x in draw().items()}
    want, want_grads = jax.value_and_grad(
      lambda p: loss(dense_moe, p, options), has_aux=True
    )(params)
  np.testing.assert_allclose(value, want[0], rtol=1e-5)
  for name, grad in want_grads.items():
    bound = 2e-5 * np.abs(grad).max()
    np.testing.assert_allclose(grads[name], grad, 0, bound, err_msg=name)
  ((chosen,),) = want[1:]
  counts = chosen.reshape(2, -1, E).sum(1)  # of each fsdp shard
  padded = -(-counts // moe._ALIGN_SIZE) * moe._ALIGN_SIZE
  np.testing.assert_array_equal(total, padded.reshape(4, 1, -1).sum(-1))


def test_the_exchange(ranks):
  """Expert e multiplies tokens by e + 1."""
  cfg = ep.EpLayerConfig(K, dispatch_output_per_expert_alignment=16)
  x = draw()["x"]
  rng = np.random.default_rng(1)
  topk_idx = rng.random((B, S, E)).argsort(-1)[..., :K].astype(np.int32)
  topk_weights = rng.random((B, S, K), np.float32)

  def run(x):
    rows, weights, mem, counts, total = ep.ep_dispatch(
      cfg, topk_idx, x, topk_weights, CAPACITY
    )
    ends = counts.cumsum(-1)[..., None, :]
    expert = (jnp.arange(CAPACITY)[:, None] >= ends).sum(-1)  # of a rank
    expert += jnp.array([0, E // 2, 0, E // 2])[:, None] + 1
    out = rows * (weights * expert)[..., None]
    y = ep.ep_combine(
      cfg, mem, counts, out, (B, S), (("fsdp", "ep"), None, None)
    )
    return y, (counts, total)

  def received(*arrays):
    return ep.ep_dispatch(cfg, *arrays, CAPACITY)[0]

  @jax.jit
  def with_gradient(x):
    y, back, others = jax.vjp(run, x, has_aux=True)
    return y, *back(y), others

  mesh, spec = ep.bootstrapped().mesh, P(("fsdp", "ep"))
  x = to_global(x, mesh, spec)
  compiled = with_gradient.lower(x).compile()
  assert_no_hidden_collectives(compiled)
  y, grad, (counts, total) = compiled(x)
  factors = (topk_weights * (topk_idx + 1)).sum(-1, keepdims=True)
  np.testing.assert_allclose(y, factors * x, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(grad, factors * y, rtol=1e-5, atol=1e-5)
  assert (counts % 16 == 0).all() and (counts.sum(-1) == total[:, 0]).all()
  arrays = topk_idx, x, topk_weights
  inside = jax.shard_map(received, mesh=mesh, in_specs=spec, out_specs=spec)
  np.testing.assert_array_equal(
    inside(*arrays), received(*arrays).reshape(-1, H)
  )


def test_a_capacity_holds_any_or_a_multiple_of_an_even_load():
  def capacity(factor=None, ep_size=4, **more):
    sizes = dict(num_experts=8, num_experts_per_tok=2, ep_size=ep_size) | more
    return moe.get_moe_recv_capacity_per_rank(
      max_tokens_per_rank=100, recv_capacity_factor=factor, **sizes
    )

  assert capacity() == 1024  # of 2 experts: 400 rows each, in blocks of 128
  assert capacity(1.0) == 256 and capacity(1.3) == 384 and capacity(9) == 1024
  assert capacity(alignment=16) == 800
  with refused("recv_capacity_factor = 0.5 at least 1"):
    capacity(0.5)


def test_dense_multiplies_and_quantization_is_refused():
  x, kernel = np.ones((2, 3), np.float32), np.ones((3, 4))
  sets = quantize.QuantizerFactory.create_set()
  y = dense.dense(x, kernel, np.ones(4), quantizer_set=sets)
  assert y.dtype == np.float32 and (y == 4).all() and not any(sets)
  mode = quantize.ScalingMode.MXFP8_1D_SCALING
  with pytest.raises(NotImplementedError, match="MXFP8_1D_SCALING quantizes"):
    quantize.QuantizerFactory.create_set(mode)
  with pytest.raises(NotImplementedError, match="NVFP4BlockScaling quantizes"):
    recipe.NVFP4BlockScaling()


def test_the_package_steps_aside(monkeypatch, tmp_path):
  monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
  folder = pathlib.Path(transformer_engine.__file__).parents[1]
  monkeypatch.syspath_prepend(folder)
  ours = importlib.import_module("transformer_engine")
  assert ours.__file__ == transformer_engine.__file__
  (tmp_path / "transformer_engine").mkdir()
  (tmp_path / "transformer_engine/__init__.py").write_text("name = 'theirs'")
  monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
  del sys.modules["transformer_engine"]
  assert importlib.import_module("transformer_engine").name == "theirs"
