# SPDX-License-Identifier: Apache-2.0
"""The parts of the training example: steps, checkpoints, metrics.

//tests/examples:train_run_test starts the whole program.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import pathlib
import resource
import types

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from conftest import make_mesh, TIMEOUT_S
import ep
from groups import of_one_process
from lm import (
  data,
  loop,
  metrics,
  model,
  placing,
  processes,
  train,
)
from lm.checkpoint import Checkpoints

_MODEL = model.ModelConfig(
  layers=2,
  hidden=16,
  heads=2,
  inner=16,
  num_experts=4,
  top_k=2,
  score="sigmoid",
)
_TRAIN = train.TrainConfig(
  decay_steps=6,
  warmup=2,
  learning_rate=1e-2,
  weight_decay=0.1,
  clip=1.0,
  aux_loss=1e-2,
  z_loss=1e-3,
  bias_rate=1e-3,
)
# A shard of 24 tokens: means of it round, unlike those of 2^n tokens.
_BATCH, _LENGTH, _SHARDS = 12, 8, 4
_TEXT = np.frombuffer(pathlib.Path(__file__).read_bytes(), np.uint8).astype(
  np.int32
)


@jax.jit
def _copy(state):
  return jax.tree.map(jnp.copy, state)


class _Program:
  """A tiny model on a mesh, with its step."""

  def __init__(self, mesh, group, config=_MODEL):
    self.layer = ep.MoE(config.moe, group)
    self.windows = data.Windows(_TEXT, _BATCH, _LENGTH, seed=0)
    self.step = train.Step(mesh, self.layer, config, _TRAIN, _SHARDS)
    self.like = train.abstract(mesh, _MODEL, _TRAIN)

  def state(self):
    """Returns the first state; a step takes the memory of its own copy."""
    return _copy(self._first_state)

  def placing(self, every):
    specs = train.partition_specs(_MODEL, _TRAIN)
    first = train.in_order(_MODEL)
    return placing.Placing(self.layer.group, specs, first, every)

  @functools.cached_property
  def _first_state(self):
    return train.init(self.layer.group.mesh, 0, _MODEL, _TRAIN)

  def run(
    self, state, steps, checkpoints=None, place_every=0, evaluate_every=3
  ):
    """Returns the state after `steps` steps in all, and the new records.

    Leaves what the run notes in `notes`.
    """
    self.notes = []
    held_out = data.Windows(_TEXT[-200:], _BATCH, _LENGTH, seed=1)[0]
    history = metrics.History()
    state = loop.run(
      self.step,
      state,
      self.windows,
      steps=steps,
      held_out=lambda state: self.step.loss(state, held_out),
      evaluate_every=evaluate_every,
      save_every=100,
      history=history,
      progress=types.SimpleNamespace(
        show=lambda record, busiest: None, note=self.notes.append
      ),
      checkpoints=checkpoints,
      placing=self.placing(place_every),
    )
    return state, history.records


def _group(mesh, num_experts=_MODEL.num_experts):
  return ep.ep_bootstrap(
    mesh,
    num_experts=num_experts,
    max_tokens_per_rank=_BATCH * _LENGTH // _SHARDS,
    hidden_dim=_MODEL.hidden,
    top_k=_MODEL.top_k,
    max_token_dtype=jnp.float32,
    timeout_s=TIMEOUT_S,
  )


@pytest.fixture(scope="module")
def program():
  mesh = make_mesh({"dp": 2, "ep": 2})
  with _group(mesh) as group:
    yield _Program(mesh, group)


def _shards(state):
  return [
    np.asarray(shard.data)
    for x in jax.tree.leaves(state)
    for shard in x.addressable_shards
  ]


@of_one_process
def test_a_resumed_run_has_the_bits_of_an_unbroken_one(program, folder):
  unbroken, records = program.run(program.state(), 6)
  assert records[-1]["loss"] < records[0]["loss"]
  held_out = [each["held_out"] for each in records]
  assert held_out[5] < held_out[2] and held_out[:2] == [None, None]
  assert np.abs(unbroken.moe.bias.addressable_data(0)).max() > 0

  first, before = program.run(
    program.state(), 4, Checkpoints(folder, {"a": 0.1})
  )
  state = Checkpoints(folder, {"a": 0.1}).restore(program.like)
  np.testing.assert_equal(_shards(state), _shards(first))
  state, after = program.run(state, 6)
  np.testing.assert_equal(_shards(state), _shards(unbroken))
  assert before + after == records


@of_one_process
def test_experts_that_are_placed_anew_leave_no_trace(program, folder):
  """Neither records nor checkpoints show it, so any run continues any other."""
  unbroken, records = program.run(program.state(), 6)
  every_two = dict(place_every=2)
  checkpoints = Checkpoints(folder, {})
  _, before = program.run(program.state(), 5, checkpoints, **every_two)
  placed = [note for note in program.notes if "placed anew" in note]
  assert [note.partition(":")[0] for note in placed] == ["step 2", "step 4"]
  state = checkpoints.restore(program.like)
  state, after = program.run(state, 6, **every_two)
  assert before + after == records
  np.testing.assert_equal(_shards(state), _shards(unbroken))


@of_one_process
def test_experts_move_to_where_ranks_are_balanced(program):
  """Two experts of a rank have all of the load, in each of the layers."""
  where = program.placing(every=3)
  state, first = program.state(), _shards(program.state())
  load = np.array([[5.0, 5, 0, 0], [0, 0, 5, 5]])
  for done, told in [(1, False), (2, False), (3, True)]:
    state, note = where.after(done, load, state)
    assert (note is not None) == told
  assert note.endswith("2.00 times the mean load, here 1.00")
  assert where.placement.experts.shape == (2, 4)
  ranks = np.take_along_axis(load, where.placement.experts, 1).reshape(2, 2, 2)
  np.testing.assert_array_equal(ranks.sum(axis=2), np.full((2, 2), 5))
  moved = _shards(state)
  assert any((a != b).any() for a, b in zip(moved, first, strict=True))
  np.testing.assert_equal(_shards(where.in_order(state)), first)


@of_one_process
def test_replicas_level_the_ranks_and_move_with_experts(program):
  mesh = program.layer.group.mesh
  config = dataclasses.replace(_MODEL, replicas=2)
  with _group(mesh, config.num_experts + 2 * config.replicas) as group:
    with_copies = _Program(mesh, group, config)
    # A step from another state does not depend on the last one. On few cores
    # its collectives would take all threads that the last one needs.
    last, records = program.run(program.state(), 4)
    jax.block_until_ready(last)
    last, got = with_copies.run(
      program.state(), 4, place_every=2, evaluate_every=100
    )
    jax.block_until_ready(last)
    last, report = with_copies.step(program.state(), program.windows[0])
    jax.block_until_ready(last)
  rows_of_a_rank = _BATCH // _SHARDS * _LENGTH * _MODEL.top_k
  assert (np.asarray(report.sums.max_rank_rows) == rows_of_a_rank).all()
  _, report = program.step(program.state(), program.windows[0])
  assert (np.asarray(report.sums.max_rank_rows) > rows_of_a_rank).all()
  for name in "loss", "entropy", "aux_loss":
    losses = ([each[name] for each in run] for run in (got, records))
    np.testing.assert_allclose(*losses, 1e-3, err_msg=name)


@of_one_process
def test_the_dense_layer_is_an_moe_of_one_expert():
  """It is as large as the experts that a token of the MoE model visits."""
  config = _MODEL.dense
  assert (config.inner, config.num_experts) == (32, 1)
  layer = ep.MoE(config.moe, make_mesh({"dp": 4, "ep": 1}))
  with layer.group as group:
    whole = NamedSharding(group.mesh, P())
    x = jax.random.normal(jax.random.key(1), (4, 3, 16))
    args = layer.init(jax.random.key(0)), x, layer.init_state()
    wanted, got = (
      jax.jit(fn, out_shardings=whole)(*args)
      for fn in (layer, model.dense_layer)
    )
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-4, atol=1e-6)
    kinds = (
      jax.tree.map(lambda x: (x.shape, x.dtype), y[1]) for y in (got, wanted)
    )
    assert next(kinds) == next(kinds)


def test_a_checkpoint_of_another_run_is_refused(program, folder):
  ours = {"hidden": 16, "seed": 0}
  Checkpoints(folder, ours).save(program.state())
  for theirs, message in [
    ({"hidden": 32, "seed": 0}, "step 0 is of another run, with hidden = 16,"),
    (ours | {"more": 1}, "with more = None, here 1"),
  ]:
    with pytest.raises(processes.Stop, match=message):
      Checkpoints(folder, theirs).restore(program.like)
  processes.first_does((folder / "0" / "description.json").unlink)
  with pytest.raises(processes.Stop, match="'description.json' is missing or"):
    Checkpoints(folder, ours).restore(program.like)


@contextlib.contextmanager
def _damaged(file, damage):
  """Replaces the contents of a file for a while, on the first process."""
  whole = []

  def replace():
    whole.append(file.read_bytes())
    file.write_bytes(damage(*whole))

  processes.first_does(replace)
  yield
  processes.first_does(lambda: file.write_bytes(*whole))


def test_a_damaged_checkpoint_stops_all_processes(program, folder):
  """Whatever happened to a file, the sentence names it and has a cure."""
  checkpoints = Checkpoints(folder, {"a": 0.1})
  checkpoints.save(program.state())
  damages = (
    lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]),
    lambda whole: whole[: len(whole) // 2],
    lambda whole: b'{"a": {}}',
  )
  for file in sorted(path for path in folder.rglob("*") if path.is_file()):
    for damage in damages:
      with _damaged(file, damage), pytest.raises(processes.Stop) as stop:
        checkpoints.restore(program.like)
      assert file.name in str(stop.value)
      assert str(stop.value).endswith("or give another folder.")
  restored = checkpoints.restore(program.like)
  np.testing.assert_equal(_shards(restored), _shards(program.state()))


# orbax abandons the other writes, each of which then finds no event loop.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_write_that_fails_stops_all_processes(program, folder):
  """The others would wait for the process that cannot write."""
  checkpoints = Checkpoints(folder, {})
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  logging.disable()  # orbax logs what it raises
  if jax.process_index() == 0:
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
  try:
    with pytest.raises(processes.Stop, match="cannot be written .*too large"):
      checkpoints.save(program.state())
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    logging.disable(logging.NOTSET)
  assert checkpoints.restore(program.like) is None


@of_one_process
def test_the_learning_rate_is_a_function_of_the_step_alone(program):
  """Beyond the schedule it stays, so any number of steps can be added."""
  _, records = program.run(program.state(), 8)
  rates = [each["learning_rate"] for each in records]
  assert rates[0] == 0 and max(rates) == rates[2] == np.float32(1e-2)
  np.testing.assert_allclose(rates[6:], 1e-3, rtol=1e-6)
  assert rates[5] > rates[6] == rates[7]


@of_one_process
def test_a_loss_that_is_not_finite_stops_the_run(program):
  state = program.state()
  norm = jax.tree.map(lambda x: x * np.nan, state.params["norm"])
  state = state._replace(params=state.params | {"norm": norm})
  with pytest.raises(processes.Stop, match="step 1: the loss is nan"):
    program.run(state, 6)


def test_processes_stop_together():
  def fail_on_the_last():
    if jax.process_index() == jax.process_count() - 1:
      raise OSError("the disk is full: é")
    return 7

  with pytest.raises(processes.Stop, match="^the disk is full: é$"):
    processes.agree(fail_on_the_last)
  assert processes.agree(lambda: 7) == 7


def test_batches_are_windows_of_the_text():
  text = np.arange(50)
  windows = data.Windows(text, batch=4, length=8, seed=1)
  batch = windows[3]
  assert batch.shape == (4, 9)
  assert (np.diff(batch, axis=1) == 1).all()
  np.testing.assert_array_equal(batch, windows[3])
  assert not np.array_equal(batch, windows[4])
  other = data.Windows(text, batch=4, length=8, seed=2)
  assert not np.array_equal(batch, other[3])
  data.Windows(text[:9], batch=4, length=8, seed=1)[0]
  with pytest.raises(
    ValueError, match="8 bytes to train on, but a window takes 9"
  ):
    data.Windows(text[:8], batch=4, length=8, seed=1)


@pytest.mark.parametrize("size", [18, 90, 400, 100_000])
def test_text_is_held_out(size):
  """In blocks of the text, of which a window fits into each."""
  text = np.arange(size)
  trained, held_out = data.split(text, length=8)
  np.testing.assert_array_equal(np.sort(np.append(trained, held_out)), text)
  assert 9 <= held_out.size <= max(9, size // 2) and trained.size >= 9


def _record(step, loss=1.0):
  return dict.fromkeys(metrics.Record.__annotations__, loss) | {"step": step}


def test_history_keeps_the_lines_before_a_resume(tmp_path):
  """It has no step twice, also if the lines of the first steps were lost."""
  path = tmp_path / "metrics.jsonl"
  first = metrics.History(path)
  for step in range(31, 36):
    first.append(_record(step))
  with path.open("a") as file:
    file.write('{"ste')  # a process was killed here
  resumed = metrics.History(path, steps_done=33)
  resumed.append(_record(34, loss=2.0))
  wanted = [_record(31), _record(32), _record(33), _record(34, loss=2.0)]
  assert resumed.records == wanted
  assert list(map(json.loads, path.read_text().splitlines())) == wanted


@pytest.mark.parametrize(
  "line", [b"[]", b"{}", b"7", b"\xff", b'{"step": 1', b'{"step": "1"}']
)
def test_a_damaged_line_of_a_history_is_named(tmp_path, line):
  path = tmp_path / "metrics.jsonl"
  metrics.History(path).append(_record(1))
  with path.open("ab") as file:
    file.write(line + b"\n")
  with pytest.raises(ValueError, match="jsonl: line 2 is no .* move the file"):
    metrics.History(path, steps_done=3)
