# SPDX-License-Identifier: Apache-2.0
"""Starts the training example: kills it, resumes it, passes bad flags."""

import re
import signal
import subprocess
import sys
import time

from absl import flags
from absl.testing import flagsaver
import numpy as np
import pytest

from ep import launch
from lm import data, model
from lm.checkpoint import Stop
import programs
import ranks
import train_moe_lm

_STEPS, _SAVE_EVERY = 100, 30
# The order in which XLA sums squares for grad_norm can vary only with 2 layers.
_TINY = (
  f"--text={__file__} --save_every={_SAVE_EVERY} --warmup=5 --batch=8"
  " --length=16 --layers=2 --hidden=32 --inner=16 --num_experts=4"
  " --num_processes=1"
).split()


def _launched(out, *more):
  """Starts a run of two processes under the launcher."""
  processes = "--num_processes=2", "--devices_per_process=2"
  return subprocess.Popen(
    [
      *(sys.executable, "-m", "ep", "launch", *processes),
      train_moe_lm.__file__,
      *(*_TINY, f"--out={out}", *more),
    ],
    env=programs.environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
  )


def test_a_killed_run_continues_bit_for_bit_on_other_ranks(
  tmp_path, monkeypatch, capfd
):
  """The second run repeats the steps after the checkpoint, and adds more steps.

  Starts with four ranks and continues with two, on xla, with fp8 rows.
  """
  out = tmp_path / "run"
  path = out / "metrics.jsonl"

  def lines():
    return path.read_bytes().splitlines() if path.exists() else []

  process = _launched(out, "--wire=mxfp8", f"--steps={_STEPS}")
  while len(lines()) < _SAVE_EVERY + 20:
    assert process.poll() is None, process.stdout.read().decode()
    time.sleep(0.01)
  process.send_signal(signal.SIGKILL)
  output = process.communicate()[0].decode(errors="replace")
  assert f"step {_SAVE_EVERY}: saved in {out}\n" in output
  assert "top 2, with mxfp8 rows" in output
  before = lines()
  assert len(before) < _STEPS

  longer = _SAVE_EVERY + 60
  # The xla backend gives the host backend's bits only if XLA optimizes no code.
  alone = "--dp=1", "--ep=2", "--backend=xla"
  picture = f"--plot={tmp_path}/run.svg"
  more = "--extend=60", "--dense", picture
  given = *_TINY, "--wire=mxfp8", *alone, *more, f"--out={out}"
  code, output = programs.run_here(train_moe_lm.main, given, monkeypatch, capfd)
  assert code == 0, output
  assert "1 x 2 (dp, ep) mesh, processes: 1" in output
  assert "resuming after step " in output
  assert len(re.findall(r"\nloss .* held out\n", output)) == 2
  assert f"{out}; the same command with --extend" in output
  assert len(lines()) == longer
  complete = before[:-1]  # The kill may have cut the last line.
  assert lines()[: len(complete)] == complete
  dense = (out / "dense" / "metrics.jsonl").read_text().splitlines()
  assert len(dense) == longer
  assert "dense minus MoE" in (tmp_path / "run.svg").read_text()


@pytest.fixture
def parse(monkeypatch):
  monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
  with flagsaver.flagsaver():
    yield lambda *given: train_moe_lm.FLAGS(["train_moe_lm", *_TINY, *given])


@pytest.mark.parametrize(
  "flag, message",
  [
    ("--num_processes=3", "num_processes must divide dp * ep"),
    ("--shards=6", "shards must be a multiple of dp * ep"),
    ("--batch=6", "batch must be a multiple of shards"),
    ("--top_k=5", "top_k must not exceed num_experts"),
    ("--hidden=48", "hidden must be a multiple of 32"),
    ("--wire=fp8_block128", "hidden must be a multiple of 128"),
    ("--warmup=600", "warmup must be shorter than decay_steps"),
    ("--plot=run.txt", "must end with .png, .svg or .pdf"),
  ],
)
def test_bad_flags_are_refused(parse, flag, message):
  with pytest.raises(flags.IllegalFlagValueError) as info:
    parse(*flag.split())
  assert message in str(info.value)


def test_ranks_may_share_a_gpu(parse, monkeypatch):
  parse("--ranks_per_gpu=4")
  started = []
  monkeypatch.setattr(launch, "launch", lambda _, **how: started.append(how))
  train_moe_lm.main(["train_moe_lm"])
  assert [how["ranks_per_gpu"] for how in started] == [4]


def test_a_loss_that_is_not_finite_stops_the_run(parse, tmp_path):
  """A step whose loss is NaN writes no metrics."""

  def layer(params, x, state, mask):
    y, metrics = model.dense_layer(params, x, state)
    return y * np.nan, metrics

  parse(f"--out={tmp_path}")
  config = train_moe_lm.config().dense
  text = data.read(ranks.text_path(), config.length)
  mesh = ranks.make_mesh(dp=1, ep=1)
  with pytest.raises(Stop, match="step 1: the loss is nan"):
    train_moe_lm.train(config, layer, mesh, text, tmp_path)
  assert not (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
  "flag, message",
  [
    ("--text=/does/not/exist", "does not exist; name a file or folder"),
    ("--text=/dev/null", "0 bytes to train on, but a window takes 17"),
    ("--out=/dev/null", "File exists: '/dev/null'"),
    ("--plot=/dev/null/a.png", "Not a directory: '/dev/null/a.png'"),
  ],
)
def test_a_path_that_is_of_no_use_is_explained_once(
  parse, capfd, flag, message
):
  parse(flag)
  assert train_moe_lm.main(["train_moe_lm"]) == 1
  output = "".join(capfd.readouterr())
  assert output.startswith("train_moe_lm: ") and output.count("\n") == 1
  assert message in output
