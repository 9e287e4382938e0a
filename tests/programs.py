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


def refusal(main, flags, monkeypatch, capfd):
  """Returns the output of a program, in this process, that ends with an error.

  Another process would import JAX, which takes a second.
  """
  monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
  monkeypatch.setattr(sys, "argv", ["program", *flags])
  with flagsaver.flagsaver(), pytest.raises(SystemExit) as end:
    app.run(main)
  assert end.value.code != 0
  # Python prints an exit code that is a text.
  return "".join(capfd.readouterr()) + str(end.value)
