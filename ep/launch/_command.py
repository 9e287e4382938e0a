# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a program: python -m ep launch."""

from __future__ import annotations

import argparse

from ep.launch._launch import launch


def main(args: list[str]) -> int:
  """Launches the program in the arguments, and returns its exit code."""
  parser = argparse.ArgumentParser(
    prog="python -m ep launch",
    description="Starts the ranks of a Python program on this host.",
  )
  parser.add_argument(
    "--num_processes", type=int, required=True, help="ranks on each host"
  )
  parser.add_argument("--devices_per_process", type=int, default=1)
  parser.add_argument("--ranks_per_gpu", type=int, default=1)
  parser.add_argument("--log_dir")
  parser.add_argument("--timeout", dest="timeout_s", type=float, help="seconds")
  parser.add_argument("--num_hosts", type=int, default=1)
  parser.add_argument(
    "--host_id", type=int, default=0, help="index of the host"
  )
  parser.add_argument("--coordinator", help="host:port, a free port of host 0")
  parser.add_argument(
    "--join_timeout",
    dest="join_timeout_s",
    type=float,
    default=300.0,
    help="seconds to wait for all hosts",
  )
  parser.add_argument(
    "--oversubscribe",
    action="store_true",
    help="start more processes than this host has memory for",
  )
  rest = argparse.REMAINDER
  parser.add_argument("-m", dest="module", nargs=rest, help="module args...")
  parser.add_argument("script", nargs=rest, help="script.py args...")
  options = vars(parser.parse_args(args))
  module, script = options.pop("module"), options.pop("script")
  argv = ["-m", *module] if module else script
  if not argv:
    parser.error("name a program to run: a file, or -m and a module")
  try:
    return launch(argv, **options)
  except ValueError as e:
    parser.error(str(e))
  except RuntimeError as e:
    parser.exit(1, f"{e}\n")
