# SPDX-License-Identifier: Apache-2.0
"""The training example as a user starts it: killed, resumed, misused."""

import os
import signal
import subprocess
import sys
import time

from absl import flags
from absl.testing import flagsaver
import pytest

from ep.examples import train_moe_lm

_STEPS, _SAVE_EVERY = 100, 30
_TINY = (
  f"--steps={_STEPS} --save_every={_SAVE_EVERY} --warmup=5 --batch=4"
  " --length=16 --layers=1 --hidden=16 --heads=2 --inner=16 --num_experts=4"
  " --num_processes=1 --sample_bytes=8 --prompt=a"
).split()


def _start(out, cache):
  env = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    "JAX_COMPILATION_CACHE_DIR": str(cache),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }
  env.pop("JAX_COORDINATOR_ADDRESS", None)  # this test may be a rank itself
  return subprocess.Popen(
    [sys.executable, train_moe_lm.__file__, *_TINY, f"--out={out}"],
    env=env,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
  )


def test_a_killed_run_continues_bit_for_bit(tmp_path):
  """It makes the steps after its checkpoint again, and with the same bits."""
  out, cache = tmp_path / "run", tmp_path / "cache"
  path = out / "metrics.jsonl"

  def lines():
    return path.read_bytes().splitlines() if path.exists() else []

  process = _start(out, cache)
  while len(lines()) < _SAVE_EVERY + 3:
    assert process.poll() is None, process.stdout.read().decode()
    time.sleep(0.01)
  process.send_signal(signal.SIGKILL)
  process.communicate()
  before = lines()
  assert len(before) < _STEPS

  process = _start(out, cache)
  output = process.communicate()[0].decode(errors="replace")
  assert process.returncode == 0, output
  assert "resuming after step " in output
  assert "--- a" in output
  assert len(lines()) == _STEPS
  complete = before[:-1]  # the kill may have cut the last line
  assert lines()[: len(complete)] == complete


@pytest.fixture
def parse(monkeypatch):
  monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
  with flagsaver.flagsaver():
    yield lambda *given: train_moe_lm.FLAGS(["train_moe_lm", *_TINY, *given])


@pytest.mark.parametrize(
  "flag, message",
  [
    ("--num_processes=3", "num_processes must divide dp * ep"),
    ("--batch=6", "batch must be a multiple of dp * ep"),
    ("--num_experts=5", "num_experts must be a multiple of ep"),
    ("--top_k=5", "top_k must not exceed num_experts"),
    ("--hidden=18", "hidden must be a multiple of 2 * heads"),
    ("--warmup=100", "warmup must be shorter than steps"),
    ("--prompt=", "a prompt has at least one byte"),
  ],
)
def test_bad_flags_are_refused(parse, flag, message):
  with pytest.raises(flags.IllegalFlagValueError) as info:
    parse(flag)
  assert message in str(info.value)


@pytest.mark.parametrize(
  "path, message",
  [
    (
      "/does/not/exist",
      "/does/not/exist does not exist; name a file or folder",
    ),
    (os.devnull, "the text has 0 bytes, but a window takes 17"),
  ],
)
def test_a_text_that_is_none_is_explained_once(parse, capfd, path, message):
  parse(f"--text={path}")
  assert train_moe_lm.main(["train_moe_lm"]) == 1
  output = "".join(capfd.readouterr())
  assert output.startswith("train_moe_lm: ") and output.count("\n") == 1
  assert message in output
