# SPDX-License-Identifier: Apache-2.0
"""Prints how many tests of a Bazel run passed and failed: "12 3".

Usage: count_tests.py BUILD_EVENTS_JSON EXIT_CODE

A test that could not be built has failed, one that is not for this
configuration (Bazel lists it as SKIPPED) does not count. A run that Bazel calls
failed though each of its tests passed has failed, too: a package or a target is
broken.
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
