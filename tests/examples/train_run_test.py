# SPDX-License-Identifier: Apache-2.0
"""The training example as a user starts it: killed, resumed, misused."""

import re
import signal
import subprocess
import sys
import time
import types

from absl import flags
from absl.testing import flagsaver
import numpy as np
import pytest

from ep import launch
import programs
import train_moe_lm

_STEPS, _SAVE_EVERY = 100, 30
# With one layer, XLA adds up the squares of all experts in one order.
_TINY = (
  f"--save_every={_SAVE_EVERY} --warmup=5 --batch=8"
  " --length=16 --layers=2 --hidden=16 --heads=2 --inner=16 --num_experts=4"
  " --num_processes=1 --text_bytes=100000"
).split()


def _launched(out, *more):
  """Starts a run of two processes under the launcher."""
  world = "--num_processes=2", "--devices_per_process=2"
  return subprocess.Popen(
    [
      *(sys.executable, "-m", "ep", "launch", *world, train_moe_lm.__file__),
      *(*_TINY, f"--out={out}", *more),
    ],
    env=programs.environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
  )


def test_a_killed_run_continues_bit_for_bit_on_other_ranks(
  tmp_path, monkeypatch, capfd
):
  """It makes the steps after its checkpoint again, and more if asked.

  Four ranks begin, and one rank goes on. Only the first run places experts
  anew. Rows travel rounded.
  """
  out = tmp_path / "run"
  path = out / "metrics.jsonl"

  def lines():
    return path.read_bytes().splitlines() if path.exists() else []

  wire = "--wire=mxfp8", "--hidden=32"
  process = _launched(out, *wire, "--placement_every=20", f"--steps={_STEPS}")
  while len(lines()) < _SAVE_EVERY + 20:
    assert process.poll() is None, process.stdout.read().decode()
    time.sleep(0.01)
  process.send_signal(signal.SIGKILL)
  output = process.communicate()[0].decode(errors="replace")
  assert f"step {_SAVE_EVERY}: saved {out}/checkpoints/{_SAVE_EVERY}" in output
  assert "top 2, whose rows travel as mxfp8" in output
  assert "step 40: experts placed anew; the busiest rank" in output
  before = lines()
  assert len(before) < _STEPS

  longer = _SAVE_EVERY + 60
  # One GPU has this backend. It rounds alike only without optimization.
  alone = "--dp=1", "--ep=1", "--backend=xla"
  trace = f"--trace={tmp_path}/steps.json.gz"
  picture = f"--plot={tmp_path}/run.svg"
  more = "--extend=60", "--dense", trace, picture
  given = *_TINY, *wire, *alone, *more, f"--out={out}"
  code, output = programs.run_here(train_moe_lm.main, given, monkeypatch, capfd)
  assert code == 0, output
  assert "1 x 1 (dp, ep) mesh, processes: 1" in output
  assert "resuming after step " in output
  for model in "", "dense: ":
    assert re.search(rf"\n{model}loss .* held out, .* tokens/s\n", output)
  assert f"{out}; the same command with --extend" in output
  assert len(lines()) == longer
  complete = before[:-1]  # the kill may have cut the last line
  assert lines()[: len(complete)] == complete
  dense = (out / "dense" / "metrics.jsonl").read_text().splitlines()
  assert len(dense) == longer
  assert "dense minus MoE" in (tmp_path / "run.svg").read_text()
  assert "of ranks 0.00" not in output
  assert "step if all loads were equal" in output
  assert "mean of " in (tmp_path / "run_trace.svg").read_text()


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
    ("--num_experts=5", "num_experts must be a multiple of ep"),
    ("--top_k=5", "top_k must not exceed num_experts"),
    ("--hidden=18", "hidden must be a multiple of 2 * heads"),
    ("--wire=mxfp8", "hidden must be a multiple of 32 with mxfp8"),
    ("--warmup=600", "warmup must be shorter than decay_steps"),
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


@pytest.mark.parametrize(
  "done, lines, message",
  [
    (0, 2, "0.003 after step 5, 0.0003 from step 600 on\n"),
    (100, 3, "resuming after step 100\n"),
    (600, 3, "resuming after step 600; --extend=100 adds steps\n"),
  ],
)
def test_a_run_says_what_it_is(parse, capsys, done, lines, message):
  parse()
  state = types.SimpleNamespace(params={}, step=done)
  config, _ = train_moe_lm.configs()
  train_moe_lm.introduce_model(config, state, train_moe_lm.FLAGS.steps)
  output = capsys.readouterr().out
  assert message in output
  assert output.count("\n") == lines, output


def test_ranks_that_are_no_power_of_two_are_noted(parse, capsys):
  parse("--dp=3", "--ep=1", "--shards=12", "--batch=24")
  text = train_moe_lm.Text(np.zeros(9), None, [], unigram=3.0)
  train_moe_lm.introduce(text)
  assert "3 ranks are not a power of two" in capsys.readouterr().out


@pytest.mark.parametrize(
  "flag, message",
  [
    ("--text=/does/not/exist", "does not exist; name a file or folder"),
    (
      "--text=/dev/null",
      "0 bytes to train on, but a window takes 17",
    ),
    ("--out=/dev/null", "--out=/dev/null: File exists; name a folder"),
    ("--plot=/dev/null/a.png", "Not a directory; name a file that can be"),
    ("--plot=/dev/null", "/dev/null: a picture's name must end with one of"),
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
