# SPDX-License-Identifier: Apache-2.0
"""ep.replay returns the choices that ep.record wrote, even after SIGKILL."""

import os
import signal
import textwrap

import jax
from jax import export, lax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np
import pytest

from cases import jit_quickly
from conftest import (
  assert_alike,
  assert_shards_equal,
  make_mesh,
  to_global,
)
import ep
from ep.testing._routings import draw
from groups import (
  BACKEND,
  bootstrap,
  E,
  group,
  H,
  K,
  layer,
  of_one_process,
  spec,
  T,
)
import programs

R, STEPS = 4, 3


def ids(*lead, seed=0):
  n = int(np.prod(lead)) * R * T
  drawn = draw(np.random.default_rng(seed), (n, K), np.ones(E))
  return drawn.reshape(*lead, R * T, K)


def replayed(folder):
  multihost_utils.sync_global_devices("recorded")  # All processes have written.
  return ep.replay(folder)


def put(a_layer, array, axes=0):
  """Returns a global array; the ranks split the axis after the first `axes`."""
  split = jax.sharding.PartitionSpec(*[None] * axes, *spec(a_layer))
  return to_global(array, a_layer.group.mesh, split)


def test_each_call_is_recorded_once(folder):
  """A call is recorded once, even if its program was compiled before `record`.

  A rematerialized block in a scan makes one recorded call per iteration, some
  with dropped rows. Weights are recorded as float32, also if the layer ignores
  the weights of `ep_prepare`.
  """
  narrow = dict(overflow="drop", drop_by="weight", recv_capacity_per_rank=18)
  layers = {
    name: layer(name=name, **options)
    for name, options in [("one", {}), ("scanned", narrow), ("left_out", {})]
  }
  choices = {name: ids(STEPS, 2, seed=i) for i, name in enumerate(layers)}

  def exchange(name, x, idx):
    weights = (idx / 4 + 0 * x[:, :K]).astype(jnp.bfloat16)
    handle = ep.ep_prepare(layers[name], idx, weights)
    rows, _ = ep.ep_dispatch(handle, x, jnp.ones(idx.shape))
    return ep.ep_combine(handle, jnp.sin(rows))

  def gradient(x, idx):
    def loss(x):
      block = jax.checkpoint(lambda x, idx: exchange("scanned", x, idx))
      x, _ = lax.scan(lambda x, i: (block(x, i), None), x, idx["scanned"])
      for name in "one", "left_out":
        x = exchange(name, x, idx[name][0])
      return x.sum()

    return jax.grad(loss)(x)

  a_layer = layers["one"]
  if jax.process_count() > 1:  # One process tests the global view.
    split = jax.sharding.PartitionSpec(None, *spec(a_layer))
    gradient = jax.shard_map(
      gradient,
      mesh=a_layer.group.mesh,
      in_specs=(spec(a_layer), split),
      out_specs=spec(a_layer),
    )
  program = jit_quickly(gradient)
  x = put(a_layer, np.ones((R * T, H), np.float32))

  def run(step):
    inputs = {k: put(a_layer, v[step], 1) for k, v in choices.items()}
    return program(x, inputs)

  expected = [run(step) for step in range(STEPS)]
  with ep.record(
    folder,
    layers=["one", "scanned"],
    weights=True,
    calls_per_step={"scanned": 2},
  ):
    for step in range(STEPS):
      got = run(step)
      assert_shards_equal(
        got, multihost_utils.process_allgather(expected[step], tiled=True)
      )
      with ep.record(None):
        run(0)
  run(0)
  record = replayed(folder)
  assert record.layers == ("one", "scanned")
  for step in range(STEPS):
    for name, call in [("one", 0), ("scanned", 0), ("scanned", 1)]:
      assert record.steps(name) == (0, 1, 2)
      got = record.topk_idx(layers[name], step, call)
      np.testing.assert_array_equal(got, choices[name][step, call])
      weights = record.topk_weights(name, step, call)
      assert weights.dtype == np.float32
      np.testing.assert_array_equal(weights, got / 4)
  # On the device mesh of another layer, the same choices are split differently.
  forced = record.forced_idx(layer("ep2_dp2", name="one"), 2)
  assert_shards_equal(forced, choices["one"][2, 0])


def test_calls_outside_of_a_program_and_of_examples(folder):
  """Each example of a `vmap` and each eager op makes a call."""
  a_layer, choices = layer(), ids(5).astype(np.int64)
  with ep.record(folder, weights=True), jax.enable_x64(True):
    for idx in choices[:2]:
      jax.block_until_ready(ep.ep_prepare(a_layer, put(a_layer, idx)))
    sizes = jax.vmap(lambda idx: ep.ep_prepare(a_layer, idx).group_sizes)(
      put(a_layer, choices[2:], 1)
    )
    jax.block_until_ready(sizes)
  record = replayed(folder)
  assert record.steps(a_layer) == (0, 1, 2, 3, 4)
  for step, idx in enumerate(choices):
    np.testing.assert_array_equal(record.topk_idx("moe", step), idx)
  with pytest.raises(ValueError, match="no moe.topk_weights; .* weights=True"):
    record.topk_weights("moe", 0)


@of_one_process
def test_chunks_are_one_call(folder):
  a_layer = layer(overflow="chunk", recv_capacity_per_rank=16)
  busy = np.broadcast_to(np.arange(K, dtype=np.int32), (R * T, K))
  matrices = {"w_up": np.ones((E, H, 2)), "w_down": np.ones((E, 2, H))}
  split = jax.sharding.PartitionSpec("ep")
  matrices = {
    k: to_global(v.astype(np.float32), a_layer.group.mesh, split)
    for k, v in matrices.items()
  }

  def loss(x, idx, matrices):
    return ep.moe_layer(a_layer, x, idx, idx / 4, **matrices).sum()

  args = put(a_layer, np.ones((R * T, H), np.float32)), put(a_layer, busy)
  with ep.record(folder, flush_s=np.inf):  # Flushes only at the end.
    for _ in range(2):
      jax.block_until_ready(jax.jit(jax.grad(loss))(*args, matrices))
  record = replayed(folder)
  assert record.steps("moe") == (0, 1)
  np.testing.assert_array_equal(record.topk_idx("moe", 1), busy)


@of_one_process
def test_another_mesh_replays_the_choices(folder):
  """Ids come from the record, and weights from the current logits."""
  config = ep.MoEConfig(H, 6, E, K)
  init = jit_quickly(lambda key: ep.moe.init(key, config))
  x = np.random.default_rng(0).normal(size=(R * T, H)).astype(np.float32)

  def run(mesh_group, seed, **forced):
    moe = ep.MoE(config, mesh_group)
    params = init(jax.random.key(seed))
    params = {k: to_global(v, mesh_group.mesh) for k, v in params.items()}
    apply = jit_quickly(lambda p, x, f: moe(p, x, **f))
    a_layer = moe.ep_layer
    return a_layer, apply(params, put(a_layer, x), forced)

  with ep.record(folder):
    jax.block_until_ready(run(group("ep4"), 0)[1])
  mesh = make_mesh({"ep": 2})
  with bootstrap(mesh, max_tokens_per_rank=R * T) as other:
    record = replayed(folder)
    forced = record.forced_idx(ep.MoE(config, other).ep_layer, 0)
    idx = record.topk_idx("moe", 0)
    assert_shards_equal(forced, idx)
    a_layer, (y, metrics) = run(other, 1, forced_idx=forced)
    load = np.bincount(idx.ravel(), minlength=E).astype(np.float32)
    assert_shards_equal(metrics.load, load)
    params = init(jax.random.key(1))
    topk = jit_quickly(lambda x, idx: ep.route_topk(x, K, forced_idx=idx))(
      x @ params["router"], idx
    )
    expected = ep.moe_layer(
      a_layer,
      *(put(a_layer, v) for v in (x, *topk)),
      **{
        k: to_global(v, mesh, jax.sharding.PartitionSpec("ep"))
        for k, v in params.items()
        if k != "router"
      },
    )
    gathered = multihost_utils.process_allgather(expected, tiled=True)
    for shard in y.addressable_shards:
      np.testing.assert_allclose(
        shard.data, gathered[shard.index], rtol=1e-5, atol=1e-6
      )


def test_a_record_that_cannot_be_made(folder, tmp_path):
  """Errors are raised before a program runs."""
  for arguments, words in [
    (dict(layers="moe"), r"pass \['moe'\]"),
    (dict(calls_per_step=2.5), "calls_per_step = 2.5"),
    (dict(calls_per_step={"moe": 0}), r"\['moe'\] = 0"),
    (dict(flush_s=0), "flush_s = 0"),
  ]:
    with pytest.raises((TypeError, ValueError), match=words):
      with ep.record(tmp_path / "new", **arguments):
        pass
  a_layer = layer()
  idx = put(a_layer, ids())

  def sizes(idx):
    return ep.ep_prepare(a_layer, idx).group_sizes

  (tmp_path / "file").touch()
  for path in "file", "file/folder", "/proc/routing", "/proc/self":
    with pytest.raises(ValueError, match="cannot make a file in .*; choose"):
      with ep.record(tmp_path / path):
        pass
  with ep.record(folder):
    with pytest.raises(ValueError, match="that is exported cannot be recorded"):
      export.export(jax.jit(sizes))(idx)
    jax.block_until_ready(sizes(idx))
    if jax.process_count() == 1:
      with (
        bootstrap(make_mesh({"ep": 2}), max_tokens_per_rank=2 * T) as other,
        pytest.raises(ValueError, match="on 4 ranks .* on 2; give the layers"),
      ):
        ep.ep_prepare(ep.EpLayerConfig(other), jnp.asarray(ids()))
  multihost_utils.sync_global_devices("recorded")
  with pytest.raises(ValueError, match="holds a record already"):
    with ep.record(folder):
      pass


@pytest.mark.skipif(
  jax.process_count() > 1 and BACKEND == "xla",
  reason="XLA's collectives wait for a process that has failed",
)
def test_files_that_cannot_be_written(tmp_path):
  """A process that cannot write says so in its error; all others also fail.

  With several processes, the last one fails.
  """
  is_hit = jax.process_index() == jax.process_count() - 1
  lost, idx = tmp_path / "lost", ids()
  words = "cannot write to .*lost" if is_hit else "rank|process"
  with pytest.raises(ep.EpError, match=words) as left:
    with (
      bootstrap(make_mesh({"ep": 4})) as a_group,
      ep.record(lost, flush_s=0.01),
    ):
      a_layer = ep.EpLayerConfig(a_group)
      program = jax.jit(lambda idx: ep.ep_prepare(a_layer, idx).group_sizes)
      idx = put(a_layer, idx)
      jax.block_until_ready(program(idx))
      if is_hit:
        lost.rename(tmp_path / "moved")
      for _ in range(10_000):
        jax.block_until_ready(program(idx))
  if is_hit:  # The context's error is chained to the program's error.
    inside = left.value.__context__
    assert isinstance(inside, ep.EpError)
    assert "cannot write to" in str(inside)


def test_nothing_was_recorded(tmp_path):
  """A warning at the user's line names the traced layers."""
  a_layer = layer()
  idx = put(a_layer, ids())
  compiled = jax.jit(lambda i: ep.ep_prepare(a_layer, i)).lower(idx).compile()
  for layers, words in [
    (["moe_3"], r"layers = \['moe_3'\], but the context has traced \['moe'\]"),
    (None, "before is not traced anew"),
  ]:
    with pytest.warns(UserWarning, match=words) as warned:
      with ep.record(tmp_path, layers=layers):
        jax.block_until_ready(compiled(idx))
        if layers:
          jax.block_until_ready(ep.ep_prepare(a_layer, idx))
    assert warned[0].filename == __file__
    assert not [*tmp_path.iterdir()]


@of_one_process
def test_a_killed_run_leaves_what_it_wrote(tmp_path):
  """SIGKILL hits the process between two flushes."""
  program = textwrap.dedent(f"""
    import os, signal, sys, time, pathlib
    sys.path.insert(0, {os.path.dirname(__file__)!r})
    from record_test import *
    choices, a_layer = ids(100), layer()
    with ep.record({str(tmp_path)!r}, flush_s=0.01):
      for idx in choices:
        jax.block_until_ready(ep.ep_prepare(a_layer, put(a_layer, idx)))
        if len(list(pathlib.Path({str(tmp_path)!r}).glob("*.npz"))) > 1:
          os.kill(os.getpid(), signal.SIGKILL)
  """)
  code, output = programs.run("-c", program)
  assert code == -signal.SIGKILL, output
  record, choices = ep.replay(tmp_path), ids(100)
  steps = record.steps("moe")
  assert steps and steps == tuple(range(len(steps)))
  for step in steps:
    np.testing.assert_array_equal(record.topk_idx("moe", step), choices[step])


@of_one_process
def test_a_replay_drops_again(folder):
  """Outputs have the same bits as in the recorded run."""
  hidden = 32
  mesh_group = group("ep4", hidden_dim=hidden)
  config = ep.MoEConfig(
    hidden,
    4,
    E,
    K,
    capacity_factor=1.0,
    overflow="drop",
    drop_by="weight",
    wire="mxfp8",
  )
  layer = ep.MoE(config, mesh_group)
  params = ep.moe.init(jax.random.key(0), config)
  skew = 2.0 * (np.arange(E) < 2)
  params["router"] += skew.astype(np.float32)  # Overloads the first rank.
  specs = ep.moe.partition_specs(config)
  params = {
    name: to_global(np.asarray(x), mesh_group.mesh, specs[name])
    for name, x in params.items()
  }
  x = np.random.default_rng(0).normal(size=(4 * T, hidden)).astype(np.float32)
  x = to_global(x + 1, mesh_group.mesh, jax.sharding.PartitionSpec("ep"))

  @jax.jit
  def run(params, x, forced_idx=None):
    y, metrics = layer(params, x, forced_idx=forced_idx)
    return y, metrics.dropped

  with ep.record(folder):
    y, dropped = jax.block_until_ready(run(params, x))
  assert dropped > 0
  again = run(params, x, replayed(folder).forced_idx(layer.ep_layer, 0))
  assert_alike(again, (y, dropped))
