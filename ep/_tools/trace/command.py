# SPDX-License-Identifier: Apache-2.0
"""Says why steps are slow: python -m ep explain steps.json.gz.

It explains each trace of a folder, for instance of $EP_TRACE, after it has
merged the files of the processes.
"""

import argparse

from ep._tools.trace import trace
from ep._tools.trace.explain import explain


def main(args: list[str]) -> int | str:
  """Prints explanations; returns the exit code, or an error text."""
  parser = argparse.ArgumentParser(
    prog="python -m ep explain",
    description="Says why the steps of a trace are slow.",
  )
  parser.add_argument(
    "path", help="a file of ep.trace, or a folder, such as $EP_TRACE"
  )
  try:
    paths = trace.files(parser.parse_args(args).path)
  except ValueError as e:
    return str(e)
  code = 0
  for path in paths:
    try:
      trace.merge_parts(path)
      found = str(explain(path))
    except (OSError, ValueError) as e:
      found, code = str(e), 1
    print(f"{path}:\n{found}")
  return code
