# SPDX-License-Identifier: Apache-2.0
"""The pinned NCCL libraries define what the nccl backend looks up in them.

Usage: symbols_test.py libraries.h FILE...

The header lists the functions of libnccl as EP_NCCL_FUNCTIONS, and those of
other libraries likewise. A library is the FILE whose name begins with, for
example, libnccl.so. No library is loaded, because that needs a CUDA driver.
"""

import pathlib
import re
import struct
import sys

_SHT_DYNSYM = 11
_SHN_UNDEF = 0


def defined_symbols(path: pathlib.Path) -> set[str]:
  """Returns the dynamic symbols that a little-endian 64-bit ELF defines."""
  elf = path.read_bytes()
  assert elf[:6] == b"\x7fELF\x02\x01", path
  (table,) = struct.unpack_from("<Q", elf, 0x28)
  entry_size, count = struct.unpack_from("<HH", elf, 0x3A)
  # A section has a type, an offset, a size, and a section that it refers to.
  sections = [
    struct.unpack_from("<4xI16xQQI", elf, table + i * entry_size)
    for i in range(count)
  ]
  names = set()
  for kind, offset, size, link in sections:
    if kind != _SHT_DYNSYM:
      continue
    strings = sections[link][1]
    symbols = struct.iter_unpack("<IxxH16x", elf[offset : offset + size])
    for name, section in symbols:
      if section != _SHN_UNDEF:
        start = strings + name
        names.add(elf[start : elf.index(b"\0", start)].decode())
  return names


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
