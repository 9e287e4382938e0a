# SPDX-License-Identifier: Apache-2.0
"""Tests that a wheel runs on every system of its platform tag.

Usage: manylinux_test.py FOLDER

The FOLDER has the wheel. auditwheel reads the processor and the symbols of the
library, and knows the glibc and libstdc++ of each platform tag. The wheel may be
for another processor than this one.
"""

import io
import json
import pathlib
import re
import subprocess
import sys
import zipfile

from elftools.elf import elffile

# The largest pages of a kernel. Kernels of GB200 have pages of 64 KiB.
_PAGES = {"aarch64": 64 << 10, "x86_64": 4 << 10}


def parse(tag: str) -> tuple[str, tuple[int, ...]]:
  """Returns processor and glibc of a tag such as manylinux_2_28_x86_64."""
  parts = re.fullmatch(r"manylinux_(\d+)_(\d+)_(\w+)", tag)
  if parts is None:
    sys.exit(f"the library runs only where {tag} does")
  return parts[3], (int(parts[1]), int(parts[2]))


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
  needed, glibc = parse(found["overall_tag"])
  promised, oldest = parse(wheel.stem.rpartition("-")[2])
  assert needed == promised, f"{wheel.name} has a library for {needed}"
  if glibc > oldest:
    sys.exit(
      f"{wheel.name} promises more: it needs {found['versioned_symbols']}."
      " Define what older runtimes do not export in ep_ffi/older_runtimes.cc,"
      " or raise the glibc of the wheel in BUILD."
    )
  with zipfile.ZipFile(wheel) as archive:
    (library,) = [name for name in archive.namelist() if name.endswith(".so")]
    elf = elffile.ELFFile(io.BytesIO(archive.read(library)))
    aligned = min(s["p_align"] for s in elf.iter_segments("PT_LOAD"))
  assert aligned >= _PAGES[needed], f"its segments are aligned to {aligned}"


if __name__ == "__main__":
  main()
