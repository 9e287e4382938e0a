"""The pinned NCCL libraries define what the nccl backend looks up in them.

Usage: symbols_test.py LIST FILE...

A line of LIST, "nccl ncclAllGather", names a library and a symbol. The library
is the one of the FILEs that is called libnccl.so, whatever comes after it.
Nothing is loaded: the libraries need a CUDA driver for that.
"""

import pathlib
import struct
import sys

_SHT_DYNSYM = 11
_SHN_UNDEF = 0


def defined_symbols(path: pathlib.Path) -> set[str]:
  """The dynamic symbols that a 64-bit little-endian ELF file defines."""
  elf = path.read_bytes()
  assert elf[:6] == b"\x7fELF\x02\x01", path
  (table,) = struct.unpack_from("<Q", elf, 0x28)
  entry_size, count = struct.unpack_from("<HH", elf, 0x3A)
  # Of each section: type, offset, size, and the section that it refers to.
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
  listing, *files = map(pathlib.Path, sys.argv[1:])
  wanted: dict[str, set[str]] = {}
  for line in listing.read_text().splitlines():
    library, symbol = line.split()
    wanted.setdefault(library, set()).add(symbol)
  assert wanted, f"{listing} is empty"
  for library, symbols in wanted.items():
    (path,) = (f for f in files if f.name.startswith(f"lib{library}.so"))
    missing = symbols - defined_symbols(path)
    assert not missing, f"{path.name} lacks {', '.join(sorted(missing))}"
    print(f"{path.name} defines all {len(symbols)}")


if __name__ == "__main__":
  main()
