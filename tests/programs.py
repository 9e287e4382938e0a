# SPDX-License-Identifier: Apache-2.0
"""Runs the repository's programs, which start ranks."""

import os
import socket
import subprocess
import sys

from absl import app
from absl.testing import flagsaver
import pytest

# Variables that make a process a rank.
OF_A_RANK = (
  "JAX_COORDINATOR_ADDRESS",
  "JAX_COORDINATOR_BIND_ADDRESS",
  "JAX_NUM_PROCESSES",
  "JAX_PROCESS_ID",
  "EP_LAUNCH_STATE",
)

# Runs ep.launch without ep/__init__.py: importing JAX takes a second.
_LAUNCHER = """
from importlib.util import find_spec, module_from_spec
import sys
sys.modules["ep"] = module_from_spec(find_spec("ep"))
from ep.launch._command import main
sys.exit(main(sys.argv[1:]))
"""


def environment(**variables):
  """Returns an environment with this process's import path.

  The program is no rank of this test.
  """
  inherited = {k: v for k, v in os.environ.items() if k not in OF_A_RANK}
  path = os.pathsep.join(filter(None, sys.path))
  return inherited | {"PYTHONPATH": path} | variables


def free_port():
  """Returns a port that no server of this machine uses."""
  with socket.socket() as s:
    s.bind(("", 0))
    return s.getsockname()[1]


def start_launcher(*words, env=None, **options):
  """Starts `ep.launch` with options, a program and its arguments."""
  argv = [sys.executable, "-c", _LAUNCHER, *map(str, words)]
  return subprocess.Popen(argv, env=environment(**(env or {})), **options)


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
