# SPDX-License-Identifier: Apache-2.0
"""Tests that a wheel runs with every glibc and libstdc++ of its platform tag.

Usage: manylinux_test.py FOLDER

The FOLDER has the wheel. auditwheel knows the symbols of each platform tag.
"""

import json
import pathlib
import re
import subprocess
import sys


def glibc(tag: str) -> tuple[int, ...]:
  """Returns the version of glibc in a tag such as manylinux_2_28_x86_64."""
  version = re.match(r"manylinux_(\d+)_(\d+)_", tag)
  return tuple(map(int, version.groups())) if version else (sys.maxsize,)


def main() -> None:
  (wheel,) = pathlib.Path(sys.argv[1]).glob("*.whl")
  shown = subprocess.run(
    [sys.executable, "-m", "auditwheel", "show", "--json", str(wheel)],
    check=True,
    stdout=subprocess.PIPE,
    env={"PYTHONPATH": ":".join(sys.path)},
  )
  found = json.loads(shown.stdout)
  print(f"{wheel.name} runs where {found['overall_tag']} does")
  if glibc(found["overall_tag"]) > glibc(wheel.stem.rpartition("-")[2]):
    sys.exit(
      f"{wheel.name} promises more: it needs {found['versioned_symbols']}."
      " Define what older runtimes do not export in ep_ffi/older_runtimes.cc,"
      " or raise the glibc of the wheel in BUILD."
    )


if __name__ == "__main__":
  main()
