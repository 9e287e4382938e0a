# SPDX-License-Identifier: Apache-2.0
"""The recipes for other frameworks compute what a dense model does."""

import contextlib

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from conftest import make_mesh, TIMEOUT_S, to_global
import ep
from ep.examples.recipes import (
  easydel,
  experts,
  marin,
  maxtext,
  megatron,
  transformer_engine,
  tunix,
)

B, S, H, F, E, K = 4, 3, 8, 16, 8, 2
KERNELS = "w0", "w1", "wo"
BIASES = "b0", "b1", "bo"


def values() -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  shapes = dict(
    x=(B, S, H),
    router=(H, E),
    w0=(E, H, F),
    w1=(E, H, F),
    wo=(E, F, H),
    b0=(E, F),
    b1=(E, F),
    bo=(E, H),
  )
  return {n: rng.standard_normal(s, np.float32) for n, s in shapes.items()}


def dense(v):
  """Returns outputs where every expert computes every token."""
  scores = jax.nn.softmax(v["x"] @ v["router"])
  least = jnp.sort(scores)[..., -K, None]
  shares = jnp.where(scores >= least, scores, 0.0)
  shares /= shares.sum(axis=-1, keepdims=True)
  gate = jnp.einsum("bsh,ehf->bsef", v["x"], v["w0"]) + v["b0"]
  up = jnp.einsum("bsh,ehf->bsef", v["x"], v["w1"]) + v["b1"]
  out = jnp.einsum("bsef,efh->bseh", jax.nn.silu(gate) * up, v["wo"]) + v["bo"]
  return jnp.einsum("bseh,bse->bsh", out, shares)


def kernels_and_biases(v):
  return tuple(v[n] for n in KERNELS), tuple(v[n] for n in BIASES)


def loss(y):
  return jnp.mean((y - 1.0) ** 2)


@pytest.fixture(scope="module")
def expected():
  """Returns what outputs and gradients are with biases, and without."""

  @jax.jit
  @jax.value_and_grad
  def of_dense(v):
    return loss(dense(v))

  with_biases = values()
  without = with_biases | {n: np.zeros_like(with_biases[n]) for n in BIASES}
  return {True: of_dense(with_biases), False: of_dense(without)}


def check(expected, group, specs, model, gathers=False):
  """Fails unless a model of the values is the dense one, with its gradients.

  `specs` are those of the values that it reads. XLA may gather some of them if
  `gathers`. Returns what the model returned beside the output.
  """
  v = values()
  args = {n: to_global(v[n], group.mesh, s) for n, s in specs.items()}

  def fn(v):
    y, *others = model(v)
    return loss(y), others

  compiled = jax.jit(jax.value_and_grad(fn, has_aux=True)).lower(args).compile()
  # Only ep moves tokens. What has an underscore is written in a recipe.
  meant = ["all-reduce", "reduce_scatter", "all_gather"]
  meant += ["all-gather", "reduce-scatter"] * gathers
  ep.assert_no_hidden_collectives(compiled, allow=meant)
  (value, others), grads = jax.block_until_ready(compiled(args))
  want_value, want_grads = expected["b0" in specs]
  np.testing.assert_allclose(value, want_value, rtol=1e-5)
  for name, grad in grads.items():
    want = want_grads[name]
    bound = 2e-5 * np.abs(want).max()
    np.testing.assert_allclose(grad, want, rtol=0, atol=bound, err_msg=name)
  return others


@contextlib.contextmanager
def layer_on(axes, axis_name, data_axes):
  with ep.ep_bootstrap(
    make_mesh(axes),
    axis_name=axis_name,
    data_axes=data_axes,
    num_experts=E,
    top_k=K,
    timeout_s=TIMEOUT_S,
  ) as group:
    yield ep.EpLayerConfig(group)


@pytest.mark.parametrize("fsdp, tensor", [(2, 1), (1, 2)])
def test_maxtext(expected, fsdp, tensor):
  axes = {"data": 1, "fsdp": fsdp, "expert": 2, "tensor": tensor}
  with layer_on(axes, "expert", ("data", "fsdp")) as layer:
    specs = dict(
      x=P(("data", "fsdp", "expert")),
      router=P(),
      w0=P("expert", "fsdp", "tensor"),
      w1=P("expert", "fsdp", "tensor"),
      wo=P("expert", "tensor", "fsdp"),
      b0=P("expert", "tensor"),
      b1=P("expert", "tensor"),
      bo=P("expert", "tensor"),
    )

    def model(v):
      gate, scores = v["x"] @ v["router"], None
      if tensor > 1:  # as DeepSeek does, with a bias of zero
        gate = scores = jax.nn.softmax(gate)
      kernels, biases = kernels_and_biases(v)
      return maxtext.sparse_matmul(
        layer, v["x"], gate, scores, *kernels, *biases
      )

    lb_loss, updates = check(
      expected, layer.group, specs, model, gathers=fsdp > 1
    )

  # Their formulas, in float64.
  v = values()
  gate = np.float64(v["x"]) @ v["router"]
  scores = np.exp(gate) / np.exp(gate).sum(axis=-1, keepdims=True)
  if tensor > 1:
    gate = scores
    scores = np.exp(gate) / np.exp(gate).sum(axis=-1, keepdims=True)
  chosen = np.argsort(-gate)[..., :K]
  visits = (chosen[..., None] == np.arange(E)).any(axis=2)  # [B, S, E]
  products = visits.mean(axis=1) * scores.mean(axis=1)
  np.testing.assert_allclose(lb_loss, 0.01 * E**2 * products.mean(), rtol=1e-5)
  want = 0.001 * np.sign(B * S * K / E - visits.sum((0, 1)))
  np.testing.assert_allclose(updates, want, rtol=1e-6)


def test_marin(expected):
  with layer_on(
    {"data": 2, "expert": 2, "model": 1}, "expert", ("data",)
  ) as layer:
    specs = dict(
      x=P(("data", "expert")),
      router=P(),
      w0=P("expert", "data"),
      w1=P("expert", "data"),
      wo=P("expert", None, "data"),
    )

    def model(v, factor=float(E), valid=None):
      x = v["x"].reshape(B * S, H)
      topk = ep.route_topk(x @ v["router"], K)
      w_up_gate = jnp.concatenate([v["w0"], v["w1"]], axis=-1)
      y, counts = marin.moe_mlp(
        layer,
        x,
        *topk,
        w_up_gate,
        v["wo"],
        token_valid=valid,
        capacity_factor=factor,
      )
      return y.reshape(B, S, H), counts

    (counts,) = check(expected, layer.group, specs, model, gathers=True)
    assert list(map(int, counts)) == [0, 0, 0]

    valid = np.arange(B * S) % 4 > 0
    v = values()
    args = {n: to_global(v[n], layer.group.mesh, s) for n, s in specs.items()}
    run = jax.jit(model, static_argnums=1)
    y, counts = jax.block_until_ready(run(args, 0.5, valid))
    logits = v["x"].reshape(-1, H) @ v["router"]
    owners = np.argsort(-logits)[:, :K] // (E // 2)
    rows = [
      np.bincount(o[m].ravel(), minlength=2)
      for o, m in zip(np.split(owners, 2), np.split(valid, 2), strict=True)
    ]
    capacity = max(E // 2, B * S // 4 * K // 2)
    dropped = np.maximum(np.stack(rows) - capacity, 0).sum()
    assert dropped > 0
    assert list(map(int, counts)) == [0, dropped, 3 * K]
    assert not np.any(np.asarray(y).reshape(-1, H)[~valid])


def test_easydel(expected):
  with layer_on({"dp": 1, "ep": 2, "tp": 2}, "ep", ("dp",)) as layer:
    column, row = P("ep", None, "tp"), P("ep", "tp")
    specs = dict(
      x=P(("dp", "ep")),
      router=P(),
      **dict(w0=column, w1=column, wo=row, b0=row, b1=row, bo=row),
    )

    def model(v):
      kernels, biases = kernels_and_biases(v)
      return easydel.sparse_moe_call(
        layer,
        v["x"],
        lambda x: x @ v["router"],
        *kernels,
        *biases,
        act_fn=jax.nn.silu,
      )

    (logits,) = check(expected, layer.group, specs, model)
    v = values()
    want = v["x"].reshape(-1, H) @ v["router"]
    np.testing.assert_allclose(logits, want, rtol=1e-5, atol=1e-5)


def test_tunix(expected):
  with layer_on({"fsdp": 2, "tp": 2}, "fsdp", ()) as layer:
    specs = dict(
      x=P("fsdp", None, "tp"),
      router=P(),
      w0=P("fsdp", None, "tp"),
      w1=P("fsdp", None, "tp"),
      wo=P("fsdp", "tp"),
    )

    def model(v):
      module = tunix.MoELayer(layer, H, F, rngs=nnx.Rngs(0))
      module.router.kernel[...] = v["router"]
      module.gate_proj[...], module.up_proj[...] = v["w0"], v["w1"]
      module.down_proj[...] = v["wo"]
      return (module(v["x"]),)

    check(expected, layer.group, specs, model, gathers=True)


@pytest.fixture
def layer():
  with layer_on({"dp": 2, "ep": 2}, "ep", ("dp",)) as layer:
    yield layer


SPECS = dict(
  x=P(("dp", "ep")), router=P(), **{n: P("ep") for n in (*KERNELS, *BIASES)}
)


def test_transformer_engine_ops(expected, layer):
  ranks = P(("dp", "ep"))

  def of_rank(rows, counts, kernels, biases):
    return _experts(rows[0], counts[0], kernels, biases)[None]

  def model(v):
    topk_idx, topk_weights = ep.route_topk(v["x"] @ v["router"], K)
    capacity = layer.capacity_for(B * S // 4)
    rows, weights, mem, counts, total = transformer_engine.ep_dispatch(
      layer, topk_idx, v["x"], topk_weights, capacity
    )
    out = jax.shard_map(
      of_rank,
      mesh=layer.group.mesh,
      in_specs=(ranks, ranks, P("ep"), P("ep")),
      out_specs=ranks,
    )(rows, counts, *kernels_and_biases(v))
    y = transformer_engine.ep_combine(
      layer, mem, counts, out * weights[..., None], (B, S)
    )
    return y, total

  (total,) = check(expected, layer.group, SPECS, model)
  assert total.shape == (4, 1) and total.sum() == B * S * K


def _experts(rows, sizes, kernels, biases):
  """Computes experts as their code does, from the counts alone."""
  w0, w1, wo = kernels
  ids = jnp.repeat(jnp.arange(len(w0)), sizes, total_repeat_length=len(rows))
  b0, b1, bo = (b[ids] for b in biases)
  gate = lax.ragged_dot(rows, w0, sizes) + b0
  up = lax.ragged_dot(rows, w1, sizes) + b1
  return lax.ragged_dot(jax.nn.silu(gate) * up, wo, sizes) + bo


@pytest.mark.parametrize("early", [False, True])
def test_transformer_engine_block(expected, layer, early):
  block = transformer_engine.MoEBlock(
    layer.group,
    num_experts=E,
    num_experts_per_tok=K,
    intermediate_size=F,
    aux_loss_coeff=0.5,
    apply_topk_weights_early=early,
    use_ffn_bias=True,
  )
  names = "wi_0 wi_1 wo wi_0_bias wi_1_bias wo_bias".split()

  def model(v):
    params = dict(
      zip(names, (v[n] for n in (*KERNELS, *BIASES)), strict=True),
      gate_kernel=v["router"],
    )
    return block.apply({"params": params}, v["x"])

  aux_loss, rows = check(expected, layer.group, SPECS, model)
  assert 0.5 <= aux_loss <= 0.5 * E and B * S * K // 4 <= rows <= B * S * K


def test_megatron(expected, layer):
  def of_rank(x, router, kernels, biases):
    probs = jax.nn.softmax(x @ router)
    best, topk_idx = lax.top_k(probs, K)
    topk_weights = best / best.sum(axis=-1, keepdims=True)
    marked = jax.nn.one_hot(topk_idx, E)
    routing_map = marked.sum(axis=-2) > 0
    probs = jnp.einsum("tk,tke->te", topk_weights, marked)

    rows, row_probs, _, sizes, handle = megatron.hybrid_ep_dispatch(
      x, routing_map, probs, layer
    )
    out = experts.feed_forward(handle, rows, kernels, biases)
    y = megatron.hybrid_ep_combine(out * row_probs[:, None], handle)
    fused = megatron.fused_dispatch(x, topk_idx, topk_weights, layer)
    again, _ = megatron.fused_combine(out * fused[2], layer, fused[4])
    return y, again, rows, sizes[None], *fused[:4]

  ranks = P(("dp", "ep"))

  def model(v):
    y, *others = jax.shard_map(
      of_rank,
      mesh=layer.group.mesh,
      in_specs=(ranks, P(), P("ep"), P("ep")),
      out_specs=ranks,
    )(v["x"].reshape(-1, H), v["router"], *kernels_and_biases(v))
    return y.reshape(B, S, H), y, *others

  got = check(expected, layer.group, SPECS, model)
  y, again, rows, sizes, fused_rows, ids, row_probs, counts = map(
    np.asarray, got
  )
  np.testing.assert_array_equal(rows, fused_rows)
  np.testing.assert_array_equal(sizes.ravel(), counts)
  np.testing.assert_allclose(again, y, rtol=1e-5, atol=1e-5)
  # The ids mark the rows that hold a token, and no others.
  np.testing.assert_array_equal(ids >= 0, row_probs > 0)
  found = ids.reshape(4, -1, 1) == np.arange(E // 2)
  np.testing.assert_array_equal(found.sum(axis=1).ravel(), counts)
