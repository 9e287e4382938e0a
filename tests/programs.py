# SPDX-License-Identifier: Apache-2.0
"""Runs the programs of this repository, which start ranks themselves."""

import os
import subprocess
import sys

from absl import app
from absl.testing import flagsaver
import pytest


def run(*argv):
  """Runs a program as a user does, and returns its exit code and output."""
  env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
  env.pop("JAX_COORDINATOR_ADDRESS", None)  # this test may be a rank itself
  done = subprocess.run(
    [sys.executable, *map(str, argv)],
    env=env,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  return done.returncode, done.stdout


def run_here(main, flags, monkeypatch, capfd):
  """Runs a program in this process, and returns its exit code and output.

  Another process would import JAX, which takes a second.
  """
  monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
  monkeypatch.setattr(sys, "argv", ["program", *flags])
  capfd.readouterr()
  with flagsaver.flagsaver(), pytest.raises(SystemExit) as end:
    app.run(main)
  return end.value.code, "".join(capfd.readouterr())


def refusal(main, flags, monkeypatch, capfd):
  """Returns the output of a program that ends with an error in this process."""
  code, output = run_here(main, flags, monkeypatch, capfd)
  assert code != 0
  return output + str(code)  # Python prints an exit code that is a text.
