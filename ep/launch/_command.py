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
  add = parser.add_argument
  add("--num_processes", type=int, required=True, help="ranks on each host")
  add("--devices_per_process", type=int, default=1)
  add("--ranks_per_gpu", type=int, default=1)
  add("--log_dir")
  add("--timeout", dest="timeout_s", type=float, metavar="SECONDS")
  add("--num_hosts", type=int, default=1)
  add("--host_id", type=int, default=0, help="index of this host")
  add("--coordinator", help="host:port, a free port of host 0")
  add(
    "--join_timeout",
    dest="join_timeout_s",
    type=float,
    default=300.0,
    help="seconds to wait for all hosts",
  )
  add(
    "--oversubscribe",
    action="store_true",
    help="start more processes than this host has memory for",
  )
  add("--max_restarts", type=int, default=0, help="restarts after failures")
  add("--max_restarts_per_hour", type=int)
  add(
    "--min_processes",
    type=int,
    help="ranks of all hosts with which a job may begin again (default: all)",
  )
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
  except RuntimeError as e:
    parser.exit(1, f"{e}\n")
