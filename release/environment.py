# SPDX-License-Identifier: Apache-2.0
"""Virtual environments for the tests of distributions."""

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
  """A virtual environment with packages from Bazel, and a working folder."""

  def __init__(self, folder: pathlib.Path):
    venv.create(folder / "venv", symlinks=True)
    self._bin = folder / "venv/bin"
    self.python = str(self._bin / "python")
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
        "PATH": f"{self._bin}:{os.environ['PATH']}",
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

  def run_tool(self, module: str, *argv: object) -> None:
    """Runs a tool that is not installed in the environment."""
    path = packages(module)
    self.run(sys.executable, "-m", module, *argv, PYTHONPATH=path)

  def install(self, *requirements: str) -> None:
    """Installs packages by pip, without downloads."""
    self.run_tool(
      *("pip", "--python", self.python, "install", "--quiet", "--no-index"),
      *("--no-cache-dir", "--disable-pip-version-check", *requirements),
    )
