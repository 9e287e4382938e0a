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


def _kill_a_run(out):
  """Trains on 2 x 2 ranks until the checkpoint of step 20 is complete."""
  with (out / "log").open("wb") as log:
    process = programs.start_launcher(
      *("--num_processes=2", "--devices_per_process=2", train_moe_lm.__file__),
      *(*_FLAGS, f"--out={out}", "--deterministic"),
      stdout=log,
      stderr=log,
    )
  while not (out / "checkpoints" / "20").exists():
    assert process.poll() is None, (out / "log").read_text(errors="replace")
    time.sleep(0.01)
  process.kill()  # the kernel also kills the ranks
  process.wait()
  assert not (out / "losses.csv").exists()


def test_a_killed_run_continues_on_other_ranks(
  unbroken, tmp_path, monkeypatch, capfd
):
  """All runs have the same bits.

  They have one rank, 2 x 2 ranks, and 1 x 3 ranks, one of them idle.
  """
  _kill_a_run(tmp_path)
  given = *_FLAGS, "--num_processes=1", "--deterministic", f"--out={tmp_path}"
  code, output = programs.run_here(
    train_moe_lm.main, (*given, "--dp=1", "--ep=3"), monkeypatch, capfd
  )
  assert code == 0, output
  assert f"losses.csv and losses.png: {tmp_path}\n" in output
  np.testing.assert_array_equal(_curves(tmp_path), unbroken)


def test_a_folder_of_another_run_is_refused(tmp_path):
  with flagsaver.flagsaver(hidden=64):
    train_moe_lm.open_checkpoints(tmp_path).close()
  with (
    flagsaver.flagsaver(hidden=128),
    pytest.raises(ValueError, match="'hidden': 64.*, not .*'hidden': 128"),
  ):
    train_moe_lm.open_checkpoints(tmp_path)
