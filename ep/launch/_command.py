# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a program: python -m ep launch."""

from __future__ import annotations

import argparse

from ep.launch._launch import launch


def main(args: list[str]) -> int:
  """Launches the program in the arguments, and returns its exit code."""
  parser = argparse.ArgumentParser(
    prog="python -m ep launch",
    description="Starts the ranks of a Python program on this machine.",
  )
  add = parser.add_argument
  add("--num_processes", type=int, required=True, help="number of ranks")
  add("--devices_per_process", type=int, default=1)
  add("--ranks_per_gpu", type=int, default=1)
  add("--log_dir")
  add("--timeout", dest="timeout_s", type=float, metavar="SECONDS")
  add(
    "--grace",
    dest="grace_s",
    type=float,
    default=10.0,
    metavar="SECONDS",
    help="time for ranks to end by themselves after a signal or a failure",
  )
  rest = argparse.REMAINDER
  add("-m", dest="module", nargs=rest, help="module args...")
  add("script", nargs=rest, help="script.py args...")
  options = vars(parser.parse_args(args))
  module, script = options.pop("module"), options.pop("script")
  argv = ["-m", *module] if module else script
  if not argv:
    parser.error("name a program to run: a file, or -m and a module")
  try:
    return launch(argv, **options)
  except ValueError as e:
    parser.error(str(e))
