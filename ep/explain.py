# SPDX-License-Identifier: Apache-2.0
"""Says why steps are slow: python -m ep.explain steps.json.gz."""

import sys

import ep

if __name__ == "__main__":
  if len(sys.argv) != 2:
    sys.exit("usage: python -m ep.explain FILE, which ep.trace wrote")
  print(ep.explain(sys.argv[1]))
else:
  # `import ep.explain` gives the function, and not this module in its place.
  sys.modules[__name__] = ep.explain  # type: ignore[assignment]
