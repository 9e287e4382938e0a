# SPDX-License-Identifier: Apache-2.0
"""Runs the commands of the package: python -m ep COMMAND."""

import argparse
import contextlib
import importlib
import sys

# The module of each command, whose `main` takes the arguments after the name.
_COMMANDS = {
  "check": ("ep._tools.check", "print versions, and backends that can run"),
  "explain": (
    "ep._tools.trace.command",
    "say why the steps of a trace are slow",
  ),
  "launch": ("ep.launch._command", "start the ranks of a program"),
  "plan": ("ep._tools.planning.command", "predict the cost of exchanges"),
  "stuck": ("ep._tools.stuck", "say which ranks wait, and for whom"),
}


def main(args: list[str]) -> int | str | None:
  """Runs the command that the first argument names; returns its exit code."""
  parser = argparse.ArgumentParser(
    prog="python -m ep",
    formatter_class=argparse.RawDescriptionHelpFormatter,
    description="\n".join(f"{n:9}{c[1]}" for n, c in _COMMANDS.items()),
    epilog="python -m ep COMMAND --help lists the arguments of a command.",
  )
  parser.add_argument("command", choices=_COMMANDS, metavar="COMMAND")
  command = parser.parse_args(args[:1]).command
  return importlib.import_module(_COMMANDS[command][0]).main(args[1:])


if __name__ == "__main__":
  _code: int | str | None = 0
  with contextlib.suppress(BrokenPipeError):  # `| head` has read enough
    _code = main(sys.argv[1:])
  with contextlib.suppress(AttributeError, OSError):
    sys.stdout.close()  # Python's own flush could change the exit code
  sys.exit(_code)
