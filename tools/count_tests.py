# SPDX-License-Identifier: Apache-2.0
"""Prints how many tests of a Bazel run passed and failed: "12 3".

Usage: count_tests.py BUILD_EVENTS_JSON EXIT_CODE

A test that cannot be built counts as failed. A test that is not for this
configuration, which Bazel lists as SKIPPED, does not count. If Bazel reports
that a run failed although each of its tests passed, a package or a target is
broken, and that counts as one failure.
"""

import json
import sys


def main() -> None:
  path, exit_code = sys.argv[1:]
  tests = set()
  passed = set()
  skipped = set()
  with open(path) as file:
    for event in map(json.loads, file):
      kind = event["id"]
      if "testSize" in event.get("configured", {}):
        tests.add(kind["targetConfigured"]["label"])
      if event.get("testSummary", {}).get("overallStatus") == "PASSED":
        passed.add(kind["testSummary"]["label"])
      if event.get("aborted", {}).get("reason") == "SKIPPED":
        skipped.add(kind.get("targetCompleted", {}).get("label"))
  failed = len(tests - passed - skipped)
  if int(exit_code) and not failed:
    failed = 1
  print(len(passed), failed)


if __name__ == "__main__":
  main()
