# SPDX-License-Identifier: Apache-2.0
"""Runs the repository's programs, which start ranks."""

import os
import socket
import subprocess
import sys

from absl import app
from absl.testing import flagsaver
import pytest


def environment(**variables):
  """Returns an environment with this process's import path.

  Removes the rank's variables, because the program is no rank of this test.
  """
  inherited = {**os.environ}
  inherited.pop("JAX_COORDINATOR_ADDRESS", None)
  path = os.pathsep.join(filter(None, sys.path))
  return inherited | {"PYTHONPATH": path} | variables


def free_address():
  """Returns 127.0.0.1 and a port that no server uses, as host:port."""
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    return "{}:{}".format(*s.getsockname())


def start_launcher(*words, start=subprocess.Popen, env=None, **options):
  """Starts `python -m ep launch` with options, a program and its arguments."""
  argv = [sys.executable, "-m", "ep", "launch", *map(str, words)]
  return start(argv, env=environment(**(env or {})), **options)


def run(*argv):
  """Runs a program, and returns its exit code and output."""
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

  Avoids the second that another process needs to import JAX.
  """
  monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
  monkeypatch.setattr(sys, "argv", ["program", *flags])
  capfd.readouterr()
  with flagsaver.flagsaver(), pytest.raises(SystemExit) as end:
    app.run(main)
  return end.value.code, "".join(capfd.readouterr())


def refusal(main, flags, monkeypatch, capfd):
  """Runs, in this process, a program that must fail; returns its output."""
  code, output = run_here(main, flags, monkeypatch, capfd)
  assert code != 0
  return output + str(code)  # Python prints a string passed to sys.exit.
