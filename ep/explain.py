# SPDX-License-Identifier: Apache-2.0
"""Says why steps are slow: python -m ep.explain steps.json.gz.

Of a folder, as $EP_TRACE names one, it explains each trace. It merges the parts
that processes have left.
"""

import argparse
import sys

import ep
from ep._src.records import trace


def main(args: list[str]) -> int | str:
  """Prints explanations; returns the exit code, or what is wrong."""
  parser = argparse.ArgumentParser(
    prog="python -m ep.explain",
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
      found = str(ep.explain(path))
    except (OSError, ValueError) as e:
      found, code = str(e), 1
    print(f"{path}:\n{found}")
  return code


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
else:
  # `import ep.explain` gives the function, and not this module in its place.
  sys.modules[__name__] = ep.explain  # type: ignore[assignment]
