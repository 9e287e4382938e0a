# SPDX-License-Identifier: Apache-2.0
"""Predicts exchanges: python -m ep.plan --preset=deepseek_v3 --nodes=32."""

import sys

import ep
from ep._src.planning import command

if __name__ == "__main__":
  command.main(sys.argv[1:], ep.presets.BY_NAME)
else:
  # `import ep.plan` gives the function, and not this module in its place.
  sys.modules[__name__] = ep.plan  # type: ignore[assignment]
