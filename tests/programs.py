# SPDX-License-Identifier: Apache-2.0
"""Runs the programs of this repository, which start ranks themselves."""

import os
import subprocess
import sys

from absl import app
from absl.testing import flagsaver
import pytest


def environment(**variables):
  """Returns what a program needs to import what this process does.

  This test may be a rank, and the program is not one.
  """
  inherited = {**os.environ}
  inherited.pop("JAX_COORDINATOR_ADDRESS", None)
  path = os.pathsep.join(filter(None, sys.path))
  return inherited | {"PYTHONPATH": path} | variables


def run(*argv):
  """Runs a program as a user does, and returns its exit code and output."""
  done = subprocess.run(
    [sys.executable, *map(str, argv)],
    env=environment(),
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
