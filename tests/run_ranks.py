"""Runs a pytest file in every rank of a world; the main of each `ep_test`.

    run_ranks.py --world=4x1 tests/foo_test.py [pytest arguments...]

Each rank's log is among the test's undeclared outputs.
"""

import argparse
import os
import sys

from ep import launch


def main() -> int:
  parser = argparse.ArgumentParser()
  parser.add_argument("--world", required=True, help="processes x devices")
  parser.add_argument("--ranks_per_gpu", type=int, default=1)
  parser.add_argument("--timeout", type=float, required=True, help="seconds")
  args, pytest_args = parser.parse_known_args()
  processes, devices = map(int, args.world.split("x"))
  only = os.environ.get("TESTBRIDGE_TEST_ONLY")  # bazel test --test_filter
  return launch.launch(
    ["-m", "pytest", "-rs", "-p", "no:cacheprovider"]
    + (["-k", only] if only else [])
    + pytest_args,
    num_processes=processes,
    devices_per_process=devices,
    ranks_per_gpu=args.ranks_per_gpu,
    timeout_s=args.timeout,
  )


if __name__ == "__main__":
  sys.exit(main())
