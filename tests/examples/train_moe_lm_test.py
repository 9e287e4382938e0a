# SPDX-License-Identifier: Apache-2.0
"""The training example learns, is killed, and continues on other ranks."""

import time

from absl.testing import flagsaver
import matplotlib.image
import numpy as np
import pytest

import programs
import train_moe_lm

_FLAGS = (
  "--steps=60 --save_every=10 --layers=2 --hidden=32 --inner=16"
  " --num_experts=4 --batch=8 --length=16 --learning_rate=1e-2"
).split()


def _curves(out):
  return np.genfromtxt(out / "losses.csv", delimiter=",")


@pytest.fixture(name="run")
def run_of_program(monkeypatch, capfd):
  def run(out, *more):
    given = *_FLAGS, "--num_processes=1", f"--out={out}", *more
    code, output = programs.run_here(
      train_moe_lm.main, given, monkeypatch, capfd
    )
    assert code == 0, output
    assert f"losses.csv and losses.png: {out}\n" in output
    return _curves(out)

  return run


@pytest.fixture(name="unbroken", scope="module")
def run_without_a_kill(tmp_path_factory):
  """Returns the curves of one rank."""
  out = tmp_path_factory.mktemp("unbroken")
  alone = "--num_processes=1", "--dp=1", "--ep=1"
  given = *_FLAGS, *alone, "--deterministic", f"--out={out}"
  code, output = programs.run(train_moe_lm.__file__, *given)
  assert code == 0, output
  loss, held_out, busiest = _curves(out).T
  assert loss[-10:].mean() < 0.7 * loss[0] and held_out[50] < 0.7 * held_out[0]
  assert np.flatnonzero(~np.isnan(held_out)).tolist() == [0, 50]
  assert (busiest >= 1).all()
  pixels = matplotlib.image.imread(out / "losses.png")
  assert pixels.shape[:2] == (400, 1000) and pixels.std() > 0.05
  return _curves(out)


def _kill_a_run(out, processes, *more):
  """Trains on four ranks until the checkpoint of step 20 is complete."""
  devices = f"--devices_per_process={4 // processes}"
  with (out / "log").open("wb") as log:
    process = programs.start_launcher(
      *(f"--num_processes={processes}", devices, train_moe_lm.__file__),
      *(*_FLAGS, f"--out={out}", *more),
      stdout=log,
      stderr=log,
    )
  while not (out / "checkpoints" / "20").exists():
    assert process.poll() is None, (out / "log").read_text(errors="replace")
    time.sleep(0.01)
  process.kill()  # the kernel also kills the ranks
  process.wait()
  assert not (out / "losses.csv").exists()


def test_a_killed_run_continues_on_other_ranks(run, unbroken, tmp_path):
  """Starts on 4 x 1 ranks; three ranks do not divide the four experts."""
  _kill_a_run(tmp_path, 1, "--dp=4", "--ep=1")
  curves = run(tmp_path, "--dp=1", "--ep=3")
  np.testing.assert_allclose(curves[:40], unbroken[:40], rtol=1e-5)


def test_a_deterministic_run_has_the_same_bits_on_any_ranks(
  run, unbroken, tmp_path
):
  """The runs have one rank, 2 x 2 ranks, and 1 x 3 ranks, one of them idle."""
  _kill_a_run(tmp_path, 2, "--deterministic")
  curves = run(tmp_path, "--deterministic", "--dp=1", "--ep=3")
  np.testing.assert_array_equal(curves, unbroken)


def test_bad_flags_are_explained_once(monkeypatch, capfd):
  given = *_FLAGS, "--shards=6"
  output = programs.refusal(train_moe_lm.main, given, monkeypatch, capfd)
  assert output.count("shards must be a power of two") == 1, output


def test_a_folder_of_another_run_is_refused(tmp_path):
  with flagsaver.flagsaver(hidden=64):
    train_moe_lm.open_checkpoints(tmp_path).close()
  with (
    flagsaver.flagsaver(hidden=128),
    pytest.raises(ValueError, match="'hidden': 64.*, not .*'hidden': 128"),
  ):
    train_moe_lm.open_checkpoints(tmp_path)
