# SPDX-License-Identifier: Apache-2.0
"""`python -m ep` says what runs here, and what to do about the rest."""

import os
import shutil
import subprocess
import sys

import jax

import ep


def run(packages, *arguments, **environment):
  """Returns the exit code and the output, with a further folder of packages."""
  path = os.pathsep.join([str(packages), *filter(None, sys.path)])
  done = subprocess.run(
    [sys.executable, "-m", "ep", *arguments],
    cwd=packages,  # Python looks there first
    env={**os.environ, "PYTHONPATH": path, **environment},
    stdout=subprocess.PIPE,
    text=True,
  )
  return done.returncode, done.stdout


def test_the_default_backend_runs(tmp_path):
  """It names versions and files, and a stranger of the same name."""
  stranger = tmp_path / "ep-0.2.4.dist-info"
  stranger.mkdir()
  (stranger / "METADATA").write_text("Name: ep\nVersion: 0.2.4\n")
  (stranger / "top_level.txt").write_text("ep\n")
  code, output = run(tmp_path)
  assert code == 0, output
  assert f"ep {ep.__version__} in {os.path.dirname(ep.__file__)}\n" in output
  assert f"jax {jax.__version__}," in output
  assert "host (the default) can run on " in output
  assert "nccl cannot run: it needs NVIDIA GPUs" in output
  assert "xla  can run\n" in output
  assert "pip uninstall ep jax-ep;" in output


def test_a_library_that_is_not_there(tmp_path):
  """The others are still tried, and there is a cure."""
  code, output = run(tmp_path, EP_FFI_LIBRARY_PATH=str(tmp_path))
  assert code == 1, output
  assert "host (the default) cannot run: libep_ffi_cpu.so was not" in output
  assert "install a wheel of jax-ep" in output
  assert "xla  can run\n" in output
  assert "WARNING" not in output


def test_a_package_that_was_overwritten(tmp_path):
  """Its first file is a stranger's."""
  shutil.copytree(os.path.dirname(ep.__file__), tmp_path / "ep")
  (tmp_path / "ep/__init__.py").write_text('__version__ = "0.2.4"')
  code, output = run(tmp_path)
  assert code == 1, output
  assert f"{tmp_path / 'ep/__init__.py'} is missing, or another" in output


def test_kernels_are_compiled_by_a_command(tmp_path):
  """It says what is wrong with sizes before it looks for a compiler."""
  code, output = run(tmp_path, "compile", "--preset=mixtral_8x7b", "--ranks=3")
  assert code == 1
  assert output.startswith("compile: --ranks=3 does not divide the 8 experts")
