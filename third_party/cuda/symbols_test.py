# SPDX-License-Identifier: Apache-2.0
"""Tests that the pinned NCCL has all functions that the nccl backend loads.

Usage: symbols_test.py libraries.h FILE...

The header lists the functions of libnccl as EP_NCCL_FUNCTIONS, and the
functions of other libraries likewise. The test looks for a FILE whose name
begins with, for example, libnccl.so. It loads no library, because that needs a
CUDA driver.
"""

import pathlib
import re
import sys

from elftools.elf import elffile


def defined_symbols(path: pathlib.Path) -> set[str]:
  """Returns the dynamic symbols that a library defines."""
  with path.open("rb") as file:
    table = elffile.ELFFile(file).get_section_by_name(".dynsym")
    return {
      symbol.name
      for symbol in table.iter_symbols()
      if symbol["st_shndx"] != "SHN_UNDEF"
    }


def main() -> None:
  header, *files = map(pathlib.Path, sys.argv[1:])
  wanted = {
    f"lib{name.lower()}.so": set(re.findall(r"F\((\w+)\)", body))
    for name, body in re.findall(
      r"#define EP_(\w+)_FUNCTIONS\(F\)((?:.*\\\n)+.*)", header.read_text()
    )
  }
  for library in ("libnccl.so", "libnccl_ep.so"):
    (path,) = (f for f in files if f.name.startswith(library))
    assert wanted[library], f"{header} lists no function of {library}"
    missing = wanted[library] - defined_symbols(path)
    assert not missing, f"{path.name} lacks {', '.join(sorted(missing))}"
    print(f"{path.name} defines all {len(wanted[library])}")


if __name__ == "__main__":
  main()
