# SPDX-License-Identifier: Apache-2.0
"""Says why steps are slow: python -m ep.explain steps.json.gz.

Of a folder, as $EP_TRACE names one, it explains each trace.
"""

import sys

import ep
from ep._src.records import trace

if __name__ == "__main__":
  if len(sys.argv) != 2:
    sys.exit("usage: python -m ep.explain FILE_OR_FOLDER, of ep.trace")
  for path in trace.files(sys.argv[1]):
    print(f"{path}:\n{ep.explain(path)}")
else:
  # `import ep.explain` gives the function, and not this module in its place.
  sys.modules[__name__] = ep.explain  # type: ignore[assignment]
