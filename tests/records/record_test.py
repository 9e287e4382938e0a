# SPDX-License-Identifier: Apache-2.0
"""ep.replay gives back what ep.record writes, whenever the run ended."""

import os
import signal
import subprocess
import sys
import textwrap

import jax
from jax import export, lax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np
import pytest

from cases import jit_quickly
from conftest import assert_shards_equal, make_mesh, to_global
import ep
from ep._src.records import files
from ep.testing._routings import draw
from groups import BACKEND, bootstrap, E, group, H, K, layer, spec, T

R, STEPS = 4, 3


def ids(*lead, seed=0):
  n = int(np.prod(lead)) * R * T
  drawn = draw(np.random.default_rng(seed), (n, K), np.ones(E))
  return drawn.reshape(*lead, R * T, K)


def replayed(folder):
  multihost_utils.sync_global_devices("recorded")  # other processes wrote, too
  return ep.replay(folder)


def put(a_layer, array, axes=0):
  """Returns a global array; the ranks split the axis after the first `axes`."""
  split = jax.sharding.PartitionSpec(*[None] * axes, *spec(a_layer))
  return to_global(array, a_layer.group.mesh, split)


def test_each_call_is_recorded_once(folder):
  """Neither what was compiled before nor what is computed again matters.

  A block that is rematerialised in a scan makes a call in each iteration, in a
  program that was traced without a record, and lacks rows in some of them.
  Weights are recorded as float32, also where the layer has no other use for
  them in `ep_prepare`.
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
  if jax.process_count() > 1:  # Each of the views has a world.
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


def test_calls_outside_of_a_program_and_of_examples(folder):
  """Each example of a `vmap` makes a call, and so does each eager op."""
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


def test_moves_and_drops_are_recorded(folder):
  """A choice that moved is its candidate, and a dropped one is as it was."""
  a_layer = layer(
    overflow="drop", drop_by="fair", recv_capacity_per_rank=10, num_candidates=5
  )
  rng = np.random.default_rng(0)
  ids = draw(rng, (R * T, 5), np.exp(-np.arange(E)))
  weights = rng.random(ids.shape, np.float32)
  with ep.record(folder, weights=True):
    handle = jax.jit(lambda *x: ep.ep_prepare(a_layer, *x))(
      put(a_layer, ids), put(a_layer, weights)
    )
    kept, candidate = (
      multihost_utils.process_allgather(x, tiled=True)
      for x in (handle.kept, handle.candidate)
    )
  assert (candidate >= K).any() and not kept.all()
  record = replayed(folder)
  assert record.steps("moe") == (0,)
  moved = np.take_along_axis(ids, candidate, 1)
  np.testing.assert_array_equal(record.topk_idx("moe", 0), moved)
  np.testing.assert_array_equal(
    record.topk_weights("moe", 0), np.take_along_axis(weights, candidate, 1)
  )
  assert ep.suggest_capacity(a_layer, record).demand.max() > 10


def test_chunks_are_one_call(folder):
  """A layer that runs in chunks is recorded as one that does not."""
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
  with ep.record(folder, flush_s=np.inf):  # at the end alone
    for _ in range(2):
      jax.block_until_ready(jax.jit(jax.grad(loss))(*args, matrices))
  record = replayed(folder)
  assert record.steps("moe") == (0, 1)
  np.testing.assert_array_equal(record.topk_idx("moe", 1), busy)


def test_another_mesh_replays_the_choices(folder):
  """Ids come from the record, and weights from the logits of now."""
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
  # One process also has the choice of two ranks.
  one = jax.process_count() == 1
  mesh = make_mesh({"ep": 2} if one else {"ep": 2, "dp": 2})
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


def calls(steps, ranks=(0, 1), **changes):
  """Yields calls of two ranks, whose ids tell step and rank."""
  for step in steps:
    for rank in ranks:
      yield files.Call(
        **dict(
          layer="moe",
          num_ranks=2,
          calls_per_step=1,
          rank=rank,
          step=step,
          call=0,
          site="jit_step#0/1",
          run=step,
          topk_idx=np.full((2, K), 10 * step + rank),
        )
        | changes
      )


def test_ranks_may_run_independent_calls_in_any_order(tmp_path):
  """Sites and runs tell which calls belong together, and rank 0 the order."""
  rows = [
    call._replace(site=site, step=step, run=0, topk_idx=call.topk_idx + add)
    for rank, order in [(0, "ab"), (1, "ba")]
    for step, site in enumerate(order)
    for add in [dict(a=100, b=200)[site]]
    for call in calls([0], [rank])
  ]
  files.Writer(tmp_path, 0).write(rows)
  record = ep.replay(tmp_path)
  assert record.topk_idx("moe", 0)[:, 0].tolist() == [100, 100, 101, 101]
  assert record.topk_idx("moe", 1)[:, 0].tolist() == [200, 200, 201, 201]


def test_steps_may_differ_in_their_tokens(tmp_path):
  """So may calls that have weights or none, but not the ranks of a step."""
  other, weights = np.full((1, K), 7), np.ones((2, K), np.float32)
  files.Writer(tmp_path, 0).write(
    [
      *calls([0]),
      *calls([1], topk_idx=other),
      *calls([2], topk_weights=weights),
      *calls([3], [0]),
      *calls([3], [1], topk_idx=other),
    ]
  )
  record = ep.replay(tmp_path)
  assert [len(record.topk_idx("moe", step)) for step in range(3)] == [4, 2, 4]
  with pytest.raises(ValueError, match="ranks differ in shape in step 3"):
    record.topk_idx("moe", 3)
  assert record.topk_weights("moe", 2).shape == (4, K)
  with pytest.raises(ValueError, match="has no moe.topk_weights"):
    record.topk_weights("moe", 0)


def test_what_is_no_record_is_an_error(tmp_path):
  """A file that is truncated, damaged, foreign or missing is told."""
  with pytest.raises(ValueError, match="holds no record"):
    ep.replay(tmp_path)
  for process, ranks in (0, [0]), (1, [1]):
    writer = files.Writer(tmp_path, process)
    writer.write(calls([0, 1], ranks))
    writer.write(calls([2], ranks))
  first, last = tmp_path / "00000-000000.npz", tmp_path / "00001-000001.npz"
  whole = first.read_bytes()
  (tmp_path / "00001-000002.npz.part").write_bytes(whole[:100])  # was killed
  assert ep.replay(tmp_path).steps("moe") == (0, 1, 2)
  for broken, words in [
    (whole[: len(whole) // 2], "truncated or damaged"),
    (b"", "truncated or damaged"),
    (
      whole.replace(
        b"ep.record 1".decode().encode("utf-32-le"),
        b"ep.record 2".decode().encode("utf-32-le"),
      ),
      "truncated",
    ),
    (b"step,layer,rank\n0,moe,1\n", "was not written by ep.record"),
  ]:
    first.write_bytes(broken)
    with pytest.raises(ValueError, match=f"{first.name} .*{words}.*; remove"):
      ep.replay(tmp_path)
  np.savez(first, weights=np.zeros(3))
  with pytest.raises(ValueError, match=f"{first.name} was not written by"):
    ep.replay(tmp_path)
  np.savez(first, format="ep.record 2")
  with pytest.raises(ValueError, match="another format than 'ep.record 1'"):
    ep.replay(tmp_path)
  first.write_bytes(whole)
  last.unlink()
  record = ep.replay(tmp_path)
  assert record.steps("moe") == (0, 1)
  with pytest.raises(ValueError, match=r"step 2 is not there of ranks \[1\]"):
    record.topk_idx("moe", 2)
  for step, call, words in [
    (3, 0, "3 steps were recorded"),
    (-1, 0, "step = -1"),
    (0, 1, "calls"),
  ]:
    with pytest.raises(ValueError, match=words):
      record.topk_idx("moe", step, call)
  with pytest.raises(ValueError, match=r"no layer 'other', but \['moe'\]"):
    record.steps("other")
  files.Writer(tmp_path, 2).write(calls([0], [1]))
  with pytest.raises(ValueError, match="a call of a rank twice"):
    ep.replay(tmp_path)
  files.Writer(tmp_path, 3).write(calls([0], num_ranks=3))
  with pytest.raises(ValueError, match=r"\[\(2, 1\), \(3, 1\)\]; they are of"):
    ep.replay(tmp_path)


@pytest.mark.parametrize(
  "column, change, words",
  [
    ("topk_idx", lambda x: x.astype(float), "moe.topk_idx is float64"),
    ("topk_idx", lambda x: x[:-1], r"\[3, 2, 3\], which .* for 4 calls"),
    ("topk_idx", lambda x: x[:, 0, 0], r"is int64 \[4\], which"),
    ("topk_idx", lambda x: x + 2**32, "has ids in .*, but valid ids are -1..7"),
    ("topk_idx", lambda x: x + E, "but valid ids are -1..7"),
    ("step", lambda x: x + 2**30, "not there of ranks"),
    ("step", lambda x: x + 2**40, "its columns are not those"),
    ("num_ranks", lambda _: np.int32(2**31 - 1), r"of ranks \[2, 3, 4, "),
    ("calls_per_step", lambda _: np.int32(2**31 - 1), None),
    ("run", lambda x: x + 2**62, None),
  ],
)
def test_contents_that_were_changed(column, change, words, tmp_path):
  """They cost no more memory than a record, and nothing is made up."""
  few = (call._replace(topk_idx=call.topk_idx % E) for call in calls([0, 1]))
  files.Writer(tmp_path, 0).write(few)
  (path,) = tmp_path.iterdir()
  arrays = dict(np.load(path))
  column = f"moe.{column}"
  np.savez(path, **arrays | {column: change(arrays[column])})

  def replayed():
    return ep.replay(tmp_path).forced_idx(layer(), 1)

  if words is None:
    assert_shards_equal(
      replayed(), arrays["moe.topk_idx"][2:].reshape(4, K).astype(np.int32)
    )
  else:
    with pytest.raises(ValueError, match=f"(?i)replay.*{words}"):
      replayed()


def test_a_replay_is_asked_and_shown(tmp_path):
  files.Writer(tmp_path, 0).write([*calls([0, 1]), *calls([2], [0])])
  record = ep.replay(tmp_path)
  assert repr(record) == (
    f"<ep.Replay of {tmp_path}, with these complete steps: {{'moe': 2}}>"
  )
  for args, words in [
    (("moe", 0.0), "step = 0.0 is a float"),
    (("moe", 0, "0"), "call = '0' is a str"),
    ((3, 0), "layer is a int"),
  ]:
    with pytest.raises(TypeError, match=words):
      record.topk_idx(*args)


def test_a_record_does_not_fit_every_layer(tmp_path):
  files.Writer(tmp_path, 0).write([*calls([0])])
  record = ep.replay(tmp_path)
  with pytest.raises(ValueError, match="has 3 choices .* top_k = 2"):
    record.forced_idx(layer(top_k=2), 0)
  files.Writer(tmp_path, 1).write(calls([1], topk_idx=np.zeros((1, K), int)))
  with pytest.raises(ValueError, match="cannot be split over 4 ranks"):
    ep.replay(tmp_path).forced_idx(layer(), 1)
  with pytest.raises(TypeError, match="layer is a str"):
    record.forced_idx("moe", 0)


def test_a_record_that_cannot_be_made(folder, tmp_path):
  """It is refused before a program runs."""
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
  for path in tmp_path / "file", tmp_path / "file/folder", "/proc/routing":
    with pytest.raises(ValueError, match="cannot make the folder .*; choose"):
      with ep.record(path):
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
  """A program of that process says so, and all other ranks have an error.

  Of several processes, the last one has the failure.
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
  if is_hit:  # what the context says follows what the program said
    inside = left.value.__context__
    assert isinstance(inside, ep.EpError)
    assert "cannot write to" in str(inside)


def test_nothing_was_recorded(tmp_path):
  """A warning says which layers there were, at the line of the user."""
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


def test_one_of_two_writers_has_the_folder(tmp_path):
  """Also if they begin at a time, and whether or not it has written yet."""
  first = files.Writer(tmp_path, 0)
  for _ in range(2):
    with pytest.raises(ValueError, match="holds a record already"):
      files.Writer(tmp_path, 0)
    first.write(calls([0]))
  files.Writer(tmp_path, 1).write(calls([0]))


@pytest.mark.skipif(jax.process_count() > 1, reason="it starts a process")
def test_a_killed_run_leaves_what_it_wrote(tmp_path):
  """The process ends between two flushes, without any cleanup."""
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
  env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
  done = subprocess.run([sys.executable, "-c", program], env=env)
  assert done.returncode == -signal.SIGKILL
  record, choices = ep.replay(tmp_path), ids(100)
  steps = record.steps("moe")
  assert steps and steps == tuple(range(len(steps)))
  for step in steps:
    np.testing.assert_array_equal(record.topk_idx("moe", step), choices[step])


@pytest.mark.parametrize(
  "options",
  [
    {"drop_by": "fair", "num_candidates": 3},
    {"drop_by": "weight", "num_candidates": 3, "wire": "mxfp8"},
  ],
  ids=["moved", "rounded"],
)
def test_a_replay_drops_and_moves_again(folder, options):
  """So the outputs have the same bits as when they were recorded."""
  hidden = 32
  mesh_group = group("ep4", hidden_dim=hidden)
  config = ep.MoEConfig(
    hidden, 4, E, K, capacity_factor=1.0, overflow="drop", **options
  )
  layer = ep.MoE(config, mesh_group)
  params = ep.moe.init(jax.random.key(0), config)
  skew = 2.0 * (np.arange(E) < 2)
  params["router"] += skew.astype(np.float32)  # crowds the first rank
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
  jax.tree.map(
    lambda a, b: [
      np.testing.assert_array_equal(s.data, t.data)
      for s, t in zip(a.addressable_shards, b.addressable_shards, strict=True)
    ],
    again,
    (y, dropped),
  )
