# SPDX-License-Identifier: Apache-2.0
"""Tests that a wheel runs on every system of its platform tag.

Usage: manylinux_test.py FOLDER

The FOLDER has the wheel, perhaps for another processor than this one.
auditwheel fails if the library is for another processor than the wheel, and
knows the glibc and libstdc++ of each platform tag.
"""

import io
import json
import pathlib
import re
import subprocess
import sys
import zipfile

from elftools.elf import elffile

# The largest pages of a kernel, which segments of the library must not share.
_PAGES = {"AArch64": 64 << 10, "x64": 4 << 10}


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
  with zipfile.ZipFile(wheel) as archive:
    (library,) = [name for name in archive.namelist() if name.endswith(".so")]
    elf = elffile.ELFFile(io.BytesIO(archive.read(library)))
  aligned = min(s["p_align"] for s in elf.iter_segments("PT_LOAD"))
  if aligned < _PAGES[elf.get_machine_arch()]:
    sys.exit(f"{library} has segments aligned to only {aligned} bytes")


if __name__ == "__main__":
  main()
