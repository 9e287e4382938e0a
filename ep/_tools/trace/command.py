# SPDX-License-Identifier: Apache-2.0
"""Says why steps are slow: python -m ep explain steps.json.gz.

Of a folder, as $EP_TRACE names one, it explains each trace. It merges the parts
that processes have left.
"""

import argparse

from ep._tools.trace import trace
from ep._tools.trace.explain import explain


def main(args: list[str]) -> int | str:
  """Prints explanations; returns the exit code, or what is wrong."""
  parser = argparse.ArgumentParser(
    prog="python -m ep explain",
    description="Says why the steps of a trace are slow.",
  )
  parser.add_argument(
    "path", help="a file of ep.trace, or a folder, as EP_TRACE names one"
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
