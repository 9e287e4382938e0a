# SPDX-License-Identifier: Apache-2.0
"""The wheel works in a virtual environment that has nothing else.

Usage: wheel_test.py FOLDER README TEST SUPPORT...

The FOLDER has the wheel. Packages that it requires are those that Bazel has
fetched; nothing is downloaded. The environment does not see the checkout: TEST,
a test file, and the files that it imports are copied.
"""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import venv

# XLA:CPU then compiles a program in a third of the time.
_QUICK = (
  "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
)
_EXAMPLE = "--dp=1 --num_processes=2 --hidden=32 --tokens_per_rank=64".split()
_TRAINING = (
  "--steps=2 --warmup=1 --num_processes=1 --dp=1 --ep=2 --layers=1 --hidden=16"
  " --inner=16 --heads=2 --batch=4 --length=16 --text_bytes=100000"
  " --sample_bytes=1 --prompt=a"
).split()


def packages(*names: str) -> str:
  """Returns the folders that have these packages, one in a line."""
  places = {importlib.util.find_spec(name).origin for name in names}
  return "\n".join({str(pathlib.Path(p).parents[1]) for p in places})


class Environment:
  """A virtual environment, and the folder in which its programs run."""

  def __init__(self, folder: pathlib.Path):
    venv.create(folder / "venv", symlinks=True)
    self.python = str(folder / "venv/bin/python")
    (self.site,) = folder.glob("venv/lib/python*/site-packages")
    (self.site / "fetched.pth").write_text(packages("jax", "optax"))
    self.work = folder / "work"
    self.work.mkdir()

  def run(self, *argv: object, **variables: str) -> str:
    """Runs its Python without variables of ours; returns what that prints."""
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

  def run_tool(self, module: str, *argv: object) -> None:
    """Runs one of our tools, which the environment does not have, on it."""
    self.run(sys.executable, "-m", module, *argv, PYTHONPATH=packages(module))


def main() -> None:
  paths = [pathlib.Path(name).resolve() for name in sys.argv[1:]]
  folder, readme, test, *support = paths
  (wheel,) = folder.glob("*.whl")
  with tempfile.TemporaryDirectory() as scratch:
    environment = Environment(pathlib.Path(scratch).resolve())
    for file in (test, *support):
      shutil.copy(file, environment.work)
    run, python = environment.run, environment.python
    environment.run_tool(
      *("pip", "--python", python, "install", "--quiet", "--no-index"),
      *("--no-cache-dir", "--disable-pip-version-check", f"{wheel}[examples]"),
    )

    report = run(python, "-m", "ep")
    assert f" in {environment.site / 'ep'}\n" in report
    assert f"{environment.site / 'ep/libep_ffi_cpu.so'} (interface" in report

    section = readme.read_text().partition("\n## Twenty lines\n")[2]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    (environment.work / "twenty.py").write_text(code)
    four = "--xla_force_host_platform_device_count=4"
    promised = code.splitlines()[-1].partition("  # ")[2]
    assert run(python, "twenty.py", XLA_FLAGS=four) == promised + "\n"

    run(python, "-m", "ep.examples.ep_moe", *_EXAMPLE, XLA_FLAGS=_QUICK)
    run(python, "-m", "ep.examples.train_moe_lm", *_TRAINING, XLA_FLAGS=_QUICK)
    run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", test.name)
    environment.run_tool(
      *("mypy", "--strict", "--python-executable", python, "--cache-dir="),
      "public_types.py",
    )


if __name__ == "__main__":
  main()
