# SPDX-License-Identifier: Apache-2.0
"""Formats the repository's files, or checks that they are formatted.

Run it as tools/format.sh [--check] [--only=NAME]. It prints one line for each
formatter, and fails if one of them fails. Two checks that change nothing or
little run with the formatters: license-line and links.
"""

import argparse
import os
import pathlib
import subprocess
import sys
from typing import NamedTuple


class Formatter(NamedTuple):
  files: tuple[str, ...]  # globs
  command: list[str]
  fix: list[str]  # further arguments
  check: list[str]


def formatters(buildifier: pathlib.Path) -> dict[str, Formatter]:
  python_m = [sys.executable, "-m"]
  return {
    "license-line": Formatter(
      files=("*.py", "*.cc", "*.cu", "*.h", "*.sh", "*.bzl", "*.bazel")
      + ("*.bazelrc", "*BUILD", "*WORKSPACE", "*.lds", "bazelw", ".ci/run"),
      command=[sys.executable, "tools/license_line.py"],
      fix=[],
      check=["--check"],
    ),
    "links": Formatter(
      files=("*.md",),
      command=[sys.executable, "tools/check_links.py"],
      fix=[],
      check=[],
    ),
    "buildifier": Formatter(
      files=("*BUILD", "*.BUILD", "*.bazel", "*.bzl", "*WORKSPACE"),
      command=[str(buildifier), "-lint=warn"],
      fix=[],
      check=["-mode=check"],
    ),
    "clang-format": Formatter(
      files=("*.cc", "*.cu", "*.h"),
      command=[
        sys.executable,
        "-c",
        "import clang_format; clang_format.clang_format()",
      ],
      fix=["-i"],
      check=["--dry-run", "-Werror"],
    ),
    "ruff-check": Formatter(
      files=("*.py",),
      command=[*python_m, "ruff", "check"],
      fix=["--fix"],
      check=[],
    ),
    "ruff-format": Formatter(
      files=("*.py",),
      command=[*python_m, "ruff", "format"],
      fix=[],
      check=["--check"],
    ),
  }


def find_files(root: pathlib.Path, globs: tuple[str, ...]) -> list[str]:
  """Returns the files that git tracks or would add, without links."""
  listing = subprocess.run(
    ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    + ["--", *globs],
    cwd=root,
    check=True,
    capture_output=True,
    text=True,
  )
  names = filter(None, listing.stdout.split("\0"))
  paths = {name: root / name for name in names}
  return sorted(
    name
    for name, path in paths.items()
    if path.is_file() and not path.is_symlink()
  )


def main() -> int:
  parser = argparse.ArgumentParser()
  parser.add_argument("--buildifier", type=pathlib.Path, required=True)
  parser.add_argument("--check", action="store_true", help="change nothing")
  parser.add_argument("--only", metavar="NAME", help="run no other formatter")
  args = parser.parse_args()
  table = formatters(args.buildifier.resolve())
  if args.only:
    table = {args.only: table[args.only]}

  root = pathlib.Path(os.environ["BUILD_WORKSPACE_DIRECTORY"])
  environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
  failed = False
  for name, formatter in table.items():
    files = find_files(root, formatter.files)
    mode = formatter.check if args.check else formatter.fix
    done = subprocess.run(
      [*formatter.command, *mode, *files], cwd=root, env=environment
    )
    failed |= done.returncode != 0
    verdict = "FAILED" if done.returncode else "PASSED"
    print(f"{name}: {len(files)} files {verdict}", flush=True)
  return int(failed)


if __name__ == "__main__":
  sys.exit(main())
