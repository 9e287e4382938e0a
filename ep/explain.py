# SPDX-License-Identifier: Apache-2.0
"""Says why steps are slow: python -m ep.explain steps.json.gz.

Of a folder, as $EP_TRACE names one, it explains each trace. It merges the parts
that processes have left.
"""

import sys

import ep
from ep._src.records import trace


def main(args: list[str]) -> int | str:
  """Prints explanations; returns the exit code, or what is wrong."""
  if len(args) != 1:
    return "usage: python -m ep.explain FILE_OR_FOLDER, of ep.trace"
  try:
    paths = trace.files(args[0])
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
