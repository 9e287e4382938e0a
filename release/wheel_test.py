# SPDX-License-Identifier: Apache-2.0
"""Tests that the wheel works in a virtual environment, without the checkout.

Usage: wheel_test.py FOLDER README EXAMPLE TEST SUPPORT...

The FOLDER has the wheel. The environment has the packages from Bazel for //ep
and its examples, which satisfy the requirements of the wheel. The test copies
the folder of the EXAMPLE, the test file TEST and the SUPPORT files, which TEST
imports, into the environment.
"""

import pathlib
import re
import shutil
import sys
import tempfile

from environment import Environment

# The XLA flag that makes compilation fast.
_QUICK = "--xla_backend_optimization_level=0"
_IMPORT_RECIPES = """
import importlib.util, pathlib, runpy
for path in sorted(pathlib.Path("examples/recipes").glob("*.py")):
  if path.stem == "levanter_moe" and not importlib.util.find_spec("levanter"):
    print(path.name, "was not imported: Levanter is not installed")
  else:
    runpy.run_path(str(path))
"""
_EXAMPLE = (
  "--dp=1 --num_processes=2 --hidden=32 --tokens_per_rank=64 --nocheck"
).split()
_TRAINING = (
  "--steps=2 --num_processes=1 --dp=1 --ep=2 --layers=2 --hidden=32 --inner=16"
  " --batch=8 --length=16"
).split()


def main() -> None:
  paths = [pathlib.Path(name).resolve() for name in sys.argv[1:]]
  folder, readme, example, test, *support = paths
  (wheel,) = folder.glob("*.whl")
  with tempfile.TemporaryDirectory() as scratch:
    environment = Environment(pathlib.Path(scratch).resolve())
    for file in (test, *support):
      shutil.copy(file, environment.work)
    shutil.copytree(example.parent, environment.work / "examples")
    run, python = environment.run, environment.python
    environment.install(f"{wheel}[examples]")

    report = run(python, "-m", "ep", "info")
    assert f" in {environment.site / 'ep'}\n" in report
    assert f"{environment.site / 'ep/libep_ffi_cpu.so'} (interface" in report

    (info,) = environment.site.glob("jax_ep-*.dist-info")
    assert not re.search(r"\]\((?!\w+:)", (info / "METADATA").read_text()), (
      "README.md has relative links, which an index cannot follow"
    )

    section = readme.read_text().partition("\n## The layer\n")[2]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    (environment.work / "layer.py").write_text(code)
    four = f"--xla_force_host_platform_device_count=4 {_QUICK}"
    promised = code.splitlines()[-1].partition("  # ")[2]
    assert run(python, "layer.py", XLA_FLAGS=four) == promised + "\n"

    for program, flags in [("ep_moe", _EXAMPLE), ("train_moe_lm", _TRAINING)]:
      run(python, f"examples/{program}.py", *flags, XLA_FLAGS=_QUICK)
    run(python, "-c", _IMPORT_RECIPES)
    run(
      *(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", test.name),
      EP_TEST_QUICK_COMPILER="1",
    )
    environment.run_tool(
      *("mypy", "--strict", "--python-executable", python),
      *("--cache-dir=/dev/null", "public_types.py"),
    )


if __name__ == "__main__":
  main()
