# SPDX-License-Identifier: Apache-2.0
"""Writes the SPDX licence line at the top of source files, or checks for it.

Usage: license_line.py [--check] FILE...
"""

import pathlib
import sys

LINE = "SPDX-License-Identifier: Apache-2.0"


def comment(name: str) -> str:
  """Returns the line as a comment in the language of the file `name`."""
  if name.endswith((".cc", ".cu", ".h")):
    return f"// {LINE}\n"
  return f"/* {LINE} */\n" if name.endswith(".lds") else f"# {LINE}\n"


def with_line(name: str, text: str) -> str:
  """Returns `text` with the line as its first line, or after a `#!` line."""
  lines = text.splitlines(keepends=True)
  start = int(text.startswith("#!"))
  line = comment(name)
  # An empty line separates the licence from a comment that follows.
  if lines[start:] and lines[start].startswith(line[0]):
    line += "\n"
  return "".join([*lines[:start], line, *lines[start:]])


def main(args: list[str]) -> int:
  check = "--check" in args
  missing = 0
  for name in args:
    if name == "--check":
      continue
    path = pathlib.Path(name)
    text = path.read_text()
    if LINE in "\n".join(text.splitlines()[:2]):
      continue
    missing += 1
    if check:
      print(f"{name} has no line {LINE!r}; tools/format.sh writes it")
    else:
      path.write_text(with_line(name, text))
  return int(check and missing > 0)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
