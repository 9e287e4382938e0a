# SPDX-License-Identifier: Apache-2.0
"""`python -m ep` says what runs here, and what to do about the rest."""

import os
import pathlib
import runpy
import shutil
import sys

import jax
import pytest

import ep
import programs


@pytest.fixture
def run(monkeypatch, capsys):
  """Returns a function that runs the module, and returns code and output."""

  def run_module():
    monkeypatch.setattr(sys, "argv", ["ep"])
    with pytest.raises(SystemExit) as end:
      runpy.run_module("ep", run_name="__main__")
    return end.value.code, capsys.readouterr().out

  return run_module


def test_a_library_that_is_not_there(run, tmp_path, monkeypatch):
  """The others are still tried, and there is a cure."""
  monkeypatch.setenv("EP_FFI_LIBRARY_PATH", str(tmp_path))
  code, output = run()
  assert code == 1, output
  assert "host (the default) cannot run: libep_ffi_cpu.so was not" in output
  assert "install a wheel of jax-ep" in output
  assert "xla  can run\n" in output
  assert "WARNING" not in output


def test_the_default_backend_runs(run, tmp_path, monkeypatch):
  """It names versions and files, and a stranger of the same name."""
  stranger = tmp_path / "ep-0.2.4.dist-info"
  stranger.mkdir()
  (stranger / "METADATA").write_text("Name: ep\nVersion: 0.2.4\n")
  (stranger / "top_level.txt").write_text("ep\n")
  monkeypatch.syspath_prepend(tmp_path)
  code, output = run()
  assert code == 0, output
  assert f"ep {ep.__version__} in {os.path.dirname(ep.__file__)}\n" in output
  assert f"jax {jax.__version__}," in output
  assert "host (the default) can run on " in output
  assert "nccl cannot run: it needs NVIDIA GPUs" in output
  assert "xla  can run\n" in output
  assert "pip uninstall ep jax-ep;" in output


def test_a_package_that_was_overwritten(tmp_path, monkeypatch):
  """Its first file is a stranger's."""
  shutil.copytree(os.path.dirname(ep.__file__), tmp_path / "ep")
  (tmp_path / "ep/__init__.py").write_text('__version__ = "0.2.4"')
  monkeypatch.syspath_prepend(tmp_path)
  code, output = programs.run("-m", "ep")
  assert code == 1, output
  assert f"{tmp_path / 'ep/__init__.py'} is missing, or another" in output


def commands():
  """Returns the modules that people run."""
  package = pathlib.Path(ep.__file__).parent
  stems = [
    p.stem for p in package.glob("[!_]*.py") if "__main__" in p.read_text()
  ]
  return ["ep", *(f"ep.{stem}" for stem in stems)]


@pytest.mark.parametrize("command", commands())
def test_each_command_explains_itself(command, monkeypatch, capsys):
  """It knows --help, and refuses an option that it does not know."""
  if command != "ep":  # runpy would find the function instead
    monkeypatch.delitem(sys.modules, command, raising=False)
  for option, code in ("--help", 0), ("--nope", 2):
    monkeypatch.setattr(sys, "argv", [command, option])
    with pytest.raises(SystemExit) as end:
      runpy.run_module(command, run_name="__main__")
    assert end.value.code == code
    assert f"usage: python -m {command} " in "".join(capsys.readouterr())
