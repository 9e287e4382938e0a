"""Prints how many tests of a Bazel run passed and failed: "12 3".

Usage: count_tests.py BUILD_EVENTS_JSON EXIT_CODE

A test that could not be built has failed. So has a run that Bazel calls failed
though each of its tests passed: a package or a target is broken.
"""

import json
import sys


def main() -> None:
  path, exit_code = sys.argv[1:]
  tests = set()
  passed = set()
  with open(path) as file:
    for event in map(json.loads, file):
      kind = event["id"]
      if "testSize" in event.get("configured", {}):
        tests.add(kind["targetConfigured"]["label"])
      if event.get("testSummary", {}).get("overallStatus") == "PASSED":
        passed.add(kind["testSummary"]["label"])
  failed = len(tests - passed)
  if int(exit_code) and not failed:
    failed = 1
  print(len(passed), failed)


if __name__ == "__main__":
  main()
