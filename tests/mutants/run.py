#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Breaks a promise by each patch of this folder, and runs the test that fails.

    tests/mutants/run.py            # all mutants, in a copy of the checkout
    tests/mutants/run.py 03 17
    tests/mutants/run.py --check    # whether patches apply and tests exist

The header of a patch says what breaks, and which test of Bazel must fail:

    Test: [--config=tsan] //folder:target [--test_filter of pytest]
"""

import argparse
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

_FOLDER = pathlib.Path(__file__).resolve().parent
_ROOT = _FOLDER.parents[1]
_VERDICTS = {0: "missed", 3: "caught"}  # exit codes of `bazel test`


class Mutant(NamedTuple):
  patch: pathlib.Path
  options: list[str]  # of Bazel
  target: str
  tests: str  # of `--test_filter`, or empty

  @classmethod
  def of(cls, patch: pathlib.Path) -> "Mutant":
    (test,) = re.findall("^Test: (.*)", patch.read_text(), re.MULTILINE)
    words = shlex.split(test)
    options = [word for word in words if word.startswith("--")]
    target, *tests = words[len(options) :]
    return cls(patch, options, target, *(tests or [""]))

  def apply(self, root: pathlib.Path, *options: str) -> bool:
    command = ["git", "apply", *options, str(self.patch)]
    return not subprocess.run(command, cwd=root, check=False).returncode

  def has_test(self) -> bool:
    """Returns whether a file of the target's folder has the test."""
    folder, name = self.target.removeprefix("//").split(":")
    name = re.sub(r"_\dx\d_\w+$", "", name)
    if (_ROOT / folder / f"{name}.cc").exists():
      return True
    text = "".join(f.read_text() for f in _ROOT.glob(f"{folder}/*_test.py"))
    tests = re.findall(r"test_\w+", self.tests)
    is_target = f'name = "{name}"' in (_ROOT / folder / "BUILD").read_text()
    return is_target and all(f"def {test}" in text for test in tests)

  def bazel(self, root: pathlib.Path, output_base: str) -> int:
    """Runs the test in `root`, which shares the checkout's built files."""
    command = [root / "bazelw", f"--output_base={output_base}", "test"]
    command += [*self.options, "--noshow_progress", self.target]
    if self.tests:
      command.append(f"--test_filter={self.tests}")
    return subprocess.run(command, cwd=root, check=False).returncode


def check(mutants: list[Mutant]) -> int:
  wrong = [m.patch.name for m in mutants if not m.apply(_ROOT, "--check")]
  wrong += [m.patch.name for m in mutants if not m.has_test()]
  if wrong:
    print("a patch does not apply, or its test does not exist:", *wrong)
  return len(wrong)


def run(mutants: list[Mutant]) -> int:
  """Prints a table, and returns the number of mutants that are not caught."""
  info = [_ROOT / "bazelw", "info", "output_base"]
  base = subprocess.run(info, cwd=_ROOT, check=True, capture_output=True)
  base = base.stdout.decode().strip()
  files = subprocess.check_output(["git", "ls-files"], cwd=_ROOT, text=True)
  table = []
  with tempfile.TemporaryDirectory() as folder:
    root = pathlib.Path(folder, "checkout")
    for file in files.splitlines():
      root.joinpath(file).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy(_ROOT / file, root / file)
    for m in mutants:
      if m.bazel(root, base):
        verdict = "fails without the patch"
      elif not m.apply(root):
        verdict = "does not apply"
      else:
        code = m.bazel(root, base)
        verdict = _VERDICTS.get(code, f"Bazel exits with {code}")
        m.apply(root, "--reverse")
      table.append((verdict, m.patch.stem))
  for row in table:
    print("{:24} {}".format(*row))
  return sum(verdict != "caught" for verdict, _ in table)


def main() -> int:
  parser = argparse.ArgumentParser()
  parser.add_argument("numbers", nargs="*", help="of mutants; default: all")
  parser.add_argument("--check", action="store_true")
  args = parser.parse_args()
  patches = sorted(_FOLDER.glob("*.patch"))
  mutants = [
    Mutant.of(p)
    for p in patches
    if not args.numbers or p.name.partition("-")[0] in args.numbers
  ]
  return (check if args.check else run)(mutants) and 1


if __name__ == "__main__":
  sys.exit(main())
