# SPDX-License-Identifier: Apache-2.0
"""`python -m ep info` says which backends run here, and how to get others."""

import os
import re
import shutil
import subprocess
import sys

import jax
import pytest

import ep
from ep.__main__ import main
import programs


def check(capsys):
  return main(["info"]), capsys.readouterr().out


def test_a_missing_library(capsys, tmp_path, monkeypatch):
  """Without the library, the check tries other backends, and names a cure."""
  monkeypatch.setenv("EP_FFI_LIBRARY_PATH", str(tmp_path))
  code, output = check(capsys)
  assert code == 1, output
  assert "host (the default) cannot run: libep_ffi_cpu.so was not" in output
  assert "install a wheel of jax-ep" in output
  assert "xla  can run\n" in output
  assert "grouped matmul: the loop over tiles, because the native" in output
  assert "WARNING" not in output


def test_the_default_backend_runs(capsys, tmp_path, monkeypatch):
  """The check prints versions and paths, and warns of another package `ep`."""
  other = tmp_path / "ep-0.2.4.dist-info"
  other.mkdir()
  (other / "METADATA").write_text("Name: ep\nVersion: 0.2.4\n")
  (other / "top_level.txt").write_text("ep\n")
  monkeypatch.syspath_prepend(tmp_path)
  code, output = check(capsys)
  assert code == 0, output
  assert f"ep {ep.__version__} in {os.path.dirname(ep.__file__)}\n" in output
  assert f"jax {jax.__version__}," in output
  assert "host (the default) can run on " in output
  assert "nccl cannot run: it needs NVIDIA GPUs" in output
  assert "xla  can run\n" in output
  assert "grouped matmul: the native library; the loop over tiles in" in output
  assert "pip uninstall ep jax-ep;" in output


def test_a_package_that_was_overwritten(tmp_path, monkeypatch):
  """The check reports that another package has replaced ep/__init__.py."""
  shutil.copytree(os.path.dirname(ep.__file__), tmp_path / "ep")
  (tmp_path / "ep/__init__.py").write_text('__version__ = "0.2.4"')
  monkeypatch.syspath_prepend(tmp_path)
  code, output = programs.run("-P", "-m", "ep", "info")
  assert code == 1, output
  assert f"{tmp_path / 'ep/__init__.py'} is missing, or another" in output


@pytest.mark.parametrize(
  "command, code, words",
  [
    ("info | true", 0, ""),
    ("info >/dev/full", 1, "no space is left for the output"),
  ],
)
def test_the_output_is_closed_or_full(command, code, words, tmp_path):
  """Commands print to closed pipes and full disks."""
  done = subprocess.run(
    ["bash", "-c", f"set -o pipefail; {sys.executable} -m ep {command}"],
    cwd=tmp_path,
    env=programs.environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  assert done.returncode == code, done.stdout
  assert "Traceback" not in done.stdout and words in done.stdout


@pytest.mark.parametrize("command", ["", " info", " launch"])
def test_each_command_explains_itself(command, capsys):
  for option, code in ("--help", 0), ("--nope", 2):
    with pytest.raises(SystemExit) as end:
      main([*command.split(), option])
    assert end.value.code == code
    assert f"usage: python -m ep{command} " in "".join(capsys.readouterr())


def test_the_help_lists_every_command(capsys):
  with pytest.raises(SystemExit):
    main(["--help"])
  listed = re.findall(r"^(\w+) {2,}[a-z]", capsys.readouterr().out, re.M)
  assert listed == ["info", "launch"]
