# SPDX-License-Identifier: Apache-2.0
"""Runs a command of the package: python -m ep COMMAND."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import sys

# For each command: the module whose `main(args)` runs it, and the help text.
_COMMANDS = {
  "info": ("ep._tools.info", "print versions and usable backends"),
  "launch": ("ep.launch._command", "start the ranks of a program"),
}


def main(args: list[str]) -> int:
  """Runs the command `args[0]`, and returns its exit code."""
  parser = argparse.ArgumentParser(
    prog="python -m ep",
    formatter_class=argparse.RawDescriptionHelpFormatter,
    description="\n".join(f"{n:9}{c[1]}" for n, c in _COMMANDS.items()),
    epilog="python -m ep COMMAND --help lists the arguments of a command.",
  )
  parser.add_argument("command", choices=_COMMANDS, metavar="COMMAND")
  command = parser.parse_args(args[:1]).command
  code: int = importlib.import_module(_COMMANDS[command][0]).main(args[1:])
  return code


if __name__ == "__main__":
  _code = 0
  if isinstance(sys.stdout, io.TextIOWrapper):  # None if it is closed
    sys.stdout.reconfigure(errors="backslashreplace")  # a path has any bytes
  try:
    _code = main(sys.argv[1:])
    print(end="", flush=True)
  except BrokenPipeError:  # a reader such as head exited
    pass
  with contextlib.suppress(AttributeError, OSError):
    # A failed flush at interpreter exit would change the exit code.
    sys.stdout.close()
  sys.exit(_code)
