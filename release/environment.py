# SPDX-License-Identifier: Apache-2.0
"""A virtual environment of packages from Bazel, for tests."""

import importlib.util
import os
import pathlib
import subprocess
import sys
import venv


def packages(*names: str) -> str:
  """Returns the folders with these packages, one per line."""
  places = {importlib.util.find_spec(name).origin for name in names}
  return "\n".join({str(pathlib.Path(p).parents[1]) for p in places})


class Environment:
  """A virtual environment, and the current folder of its programs."""

  def __init__(self, folder: pathlib.Path):
    venv.create(folder / "venv", symlinks=True)
    self.python = str(folder / "venv/bin/python")
    (self.site,) = folder.glob("venv/lib/python*/site-packages")
    (self.site / "fetched.pth").write_text(packages("jax", "optax"))
    self.work = folder / "work"
    self.work.mkdir()

  def run(self, *argv: object, **variables: str) -> str:
    """Runs a command without our environment variables; returns its output."""
    done = subprocess.run(
      list(map(str, argv)),
      cwd=self.work,
      env={
        "HOME": str(self.work),
        "JAX_PLATFORMS": "cpu",
        "PATH": os.environ["PATH"],
        "TMPDIR": str(self.work),
        **variables,
      },
      stdout=subprocess.PIPE,
      text=True,
    )
    print(done.stdout, flush=True)
    if done.returncode:
      sys.exit(f"{' '.join(map(str, argv))} failed: {done.returncode}")
    return done.stdout

  def run_tool(self, module: str, *argv: object, **variables: str) -> None:
    """Runs a tool that is not installed in the environment."""
    variables["PYTHONPATH"] = packages(module)
    self.run(sys.executable, "-m", module, *argv, **variables)

  def install(self, *options: str, **variables: str) -> None:
    """Runs pip install without downloads."""
    self.run_tool(
      *("pip", "--python", self.python, "install", "--quiet", "--no-index"),
      *("--no-cache-dir", "--disable-pip-version-check", *options),
      **variables,
    )
