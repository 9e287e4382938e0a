# SPDX-License-Identifier: Apache-2.0
"""Virtual environments and wheels for the tests of distributions."""

from collections.abc import Mapping
import importlib.util
import os
import pathlib
import subprocess
import sys
import venv
import zipfile

_WHEEL = """\
Wheel-Version: 1.0
Generator: jax-ep
Root-Is-Purelib: true
Tag: py3-none-any
"""


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

  def run_tool(self, module: str, *argv: object, **variables: str) -> None:
    """Runs a tool that is not installed in the environment."""
    variables["PYTHONPATH"] = packages(module)
    self.run(sys.executable, "-m", module, *argv, **variables)

  def pip(self, command: str, *options: str, **variables: str) -> None:
    """Runs a command of pip, such as "install", without downloads."""
    self.run_tool(
      *("pip", "--python", self.python, command, "--quiet", "--no-index"),
      *("--no-cache-dir", "--disable-pip-version-check", *options),
      **variables,
    )


def write_wheel(
  folder: pathlib.Path,
  name: str,
  version: str,
  files: Mapping[str, bytes],
  metadata: str = "",
) -> None:
  """Writes a wheel of `files` (contents by path), with more metadata lines."""
  stem = f"{name.replace('-', '_')}-{version}"
  info = f"{stem}.dist-info"
  about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}"
  contents = {
    **files,
    f"{info}/METADATA": about.encode(),
    f"{info}/WHEEL": _WHEEL.encode(),
  }
  record = "".join(f"{path},,\n" for path in [*contents, f"{info}/RECORD"])
  with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
    for path, content in contents.items():
      wheel.writestr(path, content)
    wheel.writestr(f"{info}/RECORD", record)
