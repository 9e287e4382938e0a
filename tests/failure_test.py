"""Peers that die or never come, and a library that is not there.

Each test starts a world of its own, with this file as the program: `main` is
what one rank does. A rank that sees what it should leaves a note, so that the
world may end as untidily as it likes.
"""

import os
import pathlib
import signal
import sys
import time

import pytest

from ep import launch

# What is not told by bootstrap, a rank learns from XLA's collectives or never.
only_native = pytest.mark.skipif(
  os.environ.get("EP_TEST_BACKEND") == "xla",
  reason="xla: peers are not watched, and there is no native library",
)

RANKS = 4
TIMEOUT_S = 4.0  # of the group where a timeout is what is tested
LONG_S = 120.0  # where it must not be waited for


def run_world(scenario, notes, *, processes=RANKS, env=None):
  """Notes of the ranks, by rank."""
  launch.launch(
    [__file__, scenario, notes],
    num_processes=processes,
    timeout_s=60,
    grace_s=20,
    env=env,
    log_dir=notes / "logs",
  )
  return {
    int(note.name.removeprefix("rank_")): note.read_text()
    for note in notes.glob("rank_*")
  }


@only_native
def test_a_rank_that_never_comes(tmp_path):
  """The others fail when the time is up, and say whom they missed."""
  notes = run_world("absent", tmp_path)
  assert notes.keys() == {0, 1, 2}
  for note in notes.values():
    seconds, message = note.split(" s: ", 1)
    assert TIMEOUT_S <= float(seconds) < 3 * TIMEOUT_S
    for word in ["ep_prepare", '"moe_3"', "rank 3", "timeout_s"]:
      assert word in message


@only_native
@pytest.mark.parametrize("when", ["before", "during"])
def test_a_rank_that_is_killed(tmp_path, when):
  """The others fail at once, whether they already wait for it or not."""
  notes = run_world(f"killed_{when}", tmp_path)
  assert notes.keys() == {0, 1, 2}
  for note in notes.values():
    seconds, message = note.split(" s: ", 1)
    assert float(seconds) < LONG_S / 10
    for word in ["ep_prepare", '"moe_3"', "rank 3"]:
      assert word in message


def test_a_rank_that_does_not_bootstrap(tmp_path):
  notes = run_world("no_bootstrap", tmp_path)
  assert notes.keys() == {0, 1, 2}
  for note in notes.values():
    for word in ["ep_bootstrap", "process 3", "timeout_s"]:
      assert word in note


def test_ranks_that_bootstrap_differently(tmp_path):
  notes = run_world("other_config", tmp_path)
  assert notes.keys() == {0, 1, 2, 3}
  for note in notes.values():
    for word in ["ep_bootstrap", "hidden_dim", "7", "8"]:
      assert word in note


@only_native
def test_ranks_that_run_different_layers(tmp_path):
  notes = run_world("other_layer", tmp_path)
  assert notes.keys() == {0, 1, 2, 3}
  for note in notes.values():
    for word in ["ep_prepare", '"moe_3"']:
      assert word in note


@only_native
def test_nothing_is_left_in_shared_memory(tmp_path):
  before = set(os.listdir("/dev/shm"))
  run_world("killed_during", tmp_path)
  assert set(os.listdir("/dev/shm")) <= before


@only_native
def test_no_library(tmp_path):
  """The message names the three places where it is looked for."""
  (note,) = run_world(
    "no_library",
    tmp_path,
    processes=1,
    env={"EP_FFI_LIBRARY_PATH": str(tmp_path / "nowhere.so")},
  ).values()
  for word in [
    "EP_FFI_LIBRARY_PATH",
    "nowhere.so",
    "runfiles",
    "package",
    "libep_ffi",
  ]:
    assert word in note


@only_native
def test_no_library_on_one_rank(tmp_path):
  """Is told to the others, who do not wait for it."""
  notes = run_world("no_library_on_one", tmp_path)
  assert notes.keys() == {0, 1, 2, 3}
  for note in notes.values():
    seconds, message = note.split(" s: ", 1)
    assert float(seconds) < LONG_S / 10
    assert "nowhere.so" in message


# --- The program of a rank ---------------------------------------------------


class Rank:
  """What a rank does in each scenario."""

  def __init__(self, notes):
    import jax

    from cases import bootstrap  # makes this process a rank
    from conftest import make_mesh

    self.index = jax.process_index()
    self.notes = notes
    self.bootstrap = lambda **options: bootstrap(
      make_mesh({"ep": jax.device_count()}), **options
    )

  def absent(self):
    group = self.bootstrap(timeout_s=TIMEOUT_S)
    if self.index == 3:
      self.wait_for("rank_", 3)
    else:
      self.note_error(lambda: self.prepare(group))

  def killed_before(self):
    group = self.bootstrap(timeout_s=LONG_S)
    if self.index == 3:
      self.die()
    time.sleep(2)
    self.note_error(lambda: self.prepare(group))

  def killed_during(self):
    group = self.bootstrap(timeout_s=LONG_S)
    if self.index == 3:
      self.wait_for("calls_", 3)
      time.sleep(2)  # so that the others wait for this one
      self.die()
    (self.notes / f"calls_{self.index}").touch()
    self.note_error(lambda: self.prepare(group))

  def no_bootstrap(self):
    if self.index == 3:
      self.wait_for("rank_", 3)
    else:
      self.note_error(lambda: self.bootstrap(timeout_s=TIMEOUT_S))

  def other_config(self):
    hidden_dim = 8 if self.index == 3 else 7
    self.note_error(
      lambda: self.bootstrap(timeout_s=TIMEOUT_S, hidden_dim=hidden_dim)
    )

  def other_layer(self):
    group = self.bootstrap(timeout_s=TIMEOUT_S)
    alignment = 4 if self.index == 3 else 1
    self.note_error(lambda: self.prepare(group, alignment=alignment))

  def no_library(self):
    self.note_error(self.bootstrap)

  def no_library_on_one(self):
    if self.index == 3:
      os.environ["EP_FFI_LIBRARY_PATH"] = "nowhere.so"
    self.note_error(lambda: self.bootstrap(timeout_s=LONG_S))

  def prepare(self, group, **options):
    from cases import Case, sizes
    import ep

    config = ep.EpLayerConfig(group, name="moe_3", **options)
    return Case(config).run(sizes)

  def note_error(self, fn):
    """Notes how long `fn` and its results took to fail, and how they did."""
    import jax

    start = time.monotonic()
    try:
      jax.block_until_ready(fn())
    except (RuntimeError, ValueError, OSError) as error:
      seconds = time.monotonic() - start
      note = self.notes / f"rank_{self.index}"
      note.write_text(f"{seconds:.2f} s: {error}")
    else:
      raise AssertionError("no error came")

  def wait_for(self, prefix, count):
    deadline = time.monotonic() + 30
    while len(list(self.notes.glob(prefix + "*"))) < count:
      assert time.monotonic() < deadline
      time.sleep(0.05)

  def die(self):
    os.kill(os.getpid(), signal.SIGKILL)

  def leave(self, ranks):
    """Ends when all are done; JAX's own orderly end would miss the dead."""
    (self.notes / f"done_{self.index}").touch()
    self.wait_for("done_", ranks)
    os._exit(0)


def main(scenario, notes):
  rank = Rank(pathlib.Path(notes))
  getattr(rank, scenario)()
  killed = scenario.startswith("killed")
  rank.leave(int(os.environ["JAX_NUM_PROCESSES"]) - killed)


if __name__ == "__main__":
  main(*sys.argv[1:])
