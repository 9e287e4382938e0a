# SPDX-License-Identifier: Apache-2.0
"""Tests data, steps and run folder of the training example.

//tests/examples:train_run_test starts the whole program.
"""

import contextlib
import json
import logging
import pathlib
import resource

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from conftest import make_mesh, TIMEOUT_S
import ep
from lm import data, model
from lm.checkpoint import RunFolder, Stop
from lm.step import init, Step

# If one read or write fails, orbax abandons its other reads and writes, which
# then raise errors because there is no event loop.
pytestmark = pytest.mark.filterwarnings(
  "ignore::pytest.PytestUnraisableExceptionWarning"
)

_CONFIG = model.Config(
  layers=2,
  hidden=32,
  inner=16,
  num_experts=4,
  top_k=2,
  wire=None,
  # A shard has 24 tokens, as a mean over 2^n tokens may need no rounding.
  batch=12,
  shards=4,
  length=8,
  learning_rate=1e-2,
  warmup=2,
  decay_steps=6,
  aux_loss=1e-2,
  bias_rate=1e-3,
  seed=0,
)
_TEXT = np.frombuffer(pathlib.Path(__file__).read_bytes(), np.uint8).astype(
  np.int32
)


class _Program:
  """A tiny model on a mesh, and its step."""

  def __init__(self, mesh, layer):
    self._step = Step(_CONFIG, layer, mesh)
    first = init(_CONFIG, mesh)
    # A step donates its state, so each run gets a copy.
    self.state = lambda: jax.tree.map(jnp.copy, first)

  def run(self, state, steps):
    """Runs until step `steps`; returns the state and the new reports."""
    reports = []
    for number in range(int(state.step), steps):
      state, report = self._step(state, data.batch(_TEXT, number, _CONFIG))
      reports.append(jax.device_get(report))
    return state, reports


@contextlib.contextmanager
def _program_on(axes):
  mesh = make_mesh(axes)
  tokens = _CONFIG.batch * _CONFIG.length // _CONFIG.shards
  layer = ep.MoE(
    _CONFIG.moe, mesh, max_tokens_per_rank=tokens, timeout_s=TIMEOUT_S
  )
  with layer.group:
    yield _Program(mesh, layer)


@pytest.fixture(scope="module")
def program():
  with _program_on({"dp": 2, "ep": 2}) as made:
    yield made


def _shards(state):
  return [
    np.asarray(shard.data)
    for x in jax.tree.leaves(state)
    for shard in x.addressable_shards
  ]


def test_a_resumed_run_has_the_bits_of_an_unbroken_one(program, tmp_path):
  unbroken, reports = program.run(program.state(), 8)
  assert reports[-1]["loss"] < reports[0]["loss"]
  assert np.abs(unbroken.moe.bias.addressable_data(0)).max() > 0
  # After the schedule the rate is constant, so a run can be extended.
  rates = [each["learning_rate"] for each in reports]
  assert rates[0] == 0 and max(rates) == rates[2] == np.float32(1e-2)
  np.testing.assert_allclose(rates[6:], 1e-3, rtol=1e-6)

  first, before = program.run(program.state(), 4)
  folder = RunFolder(tmp_path, {"a": 0.1})
  folder.restore(program.state())
  folder.save(first)
  state, _ = RunFolder(tmp_path, {"a": 0.1}).restore(program.state())
  np.testing.assert_equal(_shards(state), _shards(first))
  state, after = program.run(state, 8)
  np.testing.assert_equal(_shards(state), _shards(unbroken))
  np.testing.assert_equal(before + after, reports)


def test_three_ranks_continue_a_run_of_four_with_the_same_bits(tmp_path):
  """Four experts have the slots 01 23 -- on three ranks; one rank is idle."""

  def resumed(program, steps):
    folder = RunFolder(tmp_path, {})
    state, _ = folder.restore(program.state())
    state, reports = program.run(state, steps)
    folder.save(state)
    return reports

  four, three = {"dp": 1, "ep": 4}, {"dp": 1, "ep": 3}
  with _program_on(four) as all_ranks, _program_on(three) as survivors:
    _, reports = all_ranks.run(all_ranks.state(), 6)
    continued = resumed(all_ranks, 2)
    continued += resumed(survivors, 4) + resumed(all_ranks, 6)
  np.testing.assert_equal(continued, reports)


def test_one_rank_has_the_losses_and_parameters_of_four(program):
  """XLA may round the metrics of routers differently on one rank."""
  with _program_on({"dp": 1, "ep": 1}) as alone:
    (state, reports), (wanted, of_four) = (
      each.run(each.state(), 6) for each in (alone, program)
    )
  for report, other in zip(reports, of_four, strict=True):
    for name in ("loss", "grad_norm", "load", "dropped"):
      np.testing.assert_array_equal(report[name], other[name], name)
  jax.tree.map(np.testing.assert_array_equal, state, wanted)


def test_the_dense_layer_is_an_moe_of_one_expert():
  """The dense layer has the inner size of top_k experts together."""
  config = _CONFIG.dense
  assert (config.inner, config.num_experts) == (32, 1)
  layer = ep.MoE(config.moe, make_mesh({"dp": 4, "ep": 1}))
  with layer.group as group:
    whole = NamedSharding(group.mesh, P())
    x = jax.random.normal(jax.random.key(1), (4, 3, 32))
    args = layer.init(jax.random.key(0)), x, layer.init_state()
    wanted, got = (
      jax.jit(fn, out_shardings=whole)(*args)
      for fn in (layer, model.dense_layer)
    )
  np.testing.assert_allclose(got[0], wanted[0], rtol=1e-4, atol=1e-6)
  assert jax.tree.map(jnp.shape, got[1]) == jax.tree.map(jnp.shape, wanted[1])


def test_a_checkpoint_of_another_run_is_refused(program, tmp_path):
  ours = {"hidden": 16, "seed": 0}
  RunFolder(tmp_path, ours).save(program.state())
  for theirs, message in [
    ({"hidden": 32, "seed": 0}, "is of another run, with hidden = 16, here 32"),
    (ours | {"more": 1}, "with more = None, here 1"),
  ]:
    with pytest.raises(Stop, match=message):
      RunFolder(tmp_path, theirs).restore(program.state())


def test_a_damaged_checkpoint_is_not_continued(program, tmp_path):
  """With a damaged file, `restore` returns the right state or raises."""
  start, saved = program.state(), program.run(program.state(), 1)[0]
  folder = RunFolder(tmp_path, {"a": 0.1})
  folder.save(saved)
  damages = (
    lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]),
    lambda whole: whole[: len(whole) // 2],
    lambda whole: b'{"a": {}}',
  )
  refused = 0
  files = [path for path in tmp_path.rglob("1/**/*") if path.is_file()]
  for file in files:
    whole = file.read_bytes()
    for damage in damages:
      file.write_bytes(damage(whole))
      try:
        state, _ = RunFolder(tmp_path, {"a": 0.1}).restore(start)
      except (OSError, Stop) as error:
        assert f"{tmp_path}/checkpoints/1: the checkpoint" in str(error)
        refused += 1
      else:
        np.testing.assert_equal(_shards(state), _shards(saved))
    file.write_bytes(whole)
  # Orbax never reads some files, so damage to these files is not refused.
  assert refused > len(damages)
  state, _ = RunFolder(tmp_path, {"a": 0.1}).restore(start)
  np.testing.assert_equal(_shards(state), _shards(saved))


def test_a_write_that_fails_leaves_the_checkpoint_before(program, tmp_path):
  folder = RunFolder(tmp_path, {})
  start = program.state()
  folder.save(start)
  state, _ = program.run(program.state(), 1)
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  logging.disable()  # orbax logs the errors that it raises.
  resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
  try:
    with pytest.raises(OSError, match="/1: the checkpoint cannot be written"):
      folder.save(state)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    logging.disable(logging.NOTSET)
  restored, _ = RunFolder(tmp_path, {}).restore(program.state())
  np.testing.assert_equal(_shards(restored), _shards(start))


def test_batches_are_windows_of_the_text():
  text = np.arange(50)
  batch = data.batch(text, 3, _CONFIG)
  assert batch.shape == (12, 9)
  assert (np.diff(batch, axis=1) == 1).all()
  np.testing.assert_array_equal(batch, data.batch(text, 3, _CONFIG))
  assert not np.array_equal(batch, data.batch(text, 4, _CONFIG))
  data.batch(text[:9], 0, _CONFIG)


@pytest.mark.parametrize("size", [18, 90, 400, 100_000])
def test_text_is_held_out(size):
  """Holds out blocks of the text that are longer than a window."""
  text = np.arange(size)
  trained, held_out = data.split(text, length=8)
  np.testing.assert_array_equal(np.sort(np.append(trained, held_out)), text)
  assert 9 <= held_out.size <= max(9, size // 2) and trained.size >= 9


def test_metrics_keep_the_lines_before_a_resume(program, tmp_path):
  """No step occurs twice after a resume, even if the first lines were lost."""
  path = tmp_path / "metrics.jsonl"
  old = [{"step": step, "loss": 1.0} for step in range(31, 36)]
  path.write_text("".join(json.dumps(each) + "\n" for each in old) + '{"ste')
  folder = RunFolder(tmp_path, {})
  folder.save(program.state()._replace(step=jnp.int32(33)))
  _, records = folder.restore(program.state())
  assert records == old[:3]
  folder.append({"step": 34, "loss": 2.0})
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  assert lines == [*old[:3], {"step": 34, "loss": 2.0}]


@pytest.mark.parametrize(
  "line", [b"[]", b"{}", b"7", b"\xff", b'{"step": 1', b'{"step": "1"}']
)
def test_a_damaged_line_of_metrics_is_explained(program, tmp_path, line):
  path = tmp_path / "metrics.jsonl"
  path.write_bytes(b'{"step": 1}\n' + line + b"\n")
  with pytest.raises(Stop, match="jsonl: a line is no .* move the file"):
    RunFolder(tmp_path, {}).restore(program.state())
