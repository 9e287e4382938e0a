# SPDX-License-Identifier: Apache-2.0
"""The calls of TransformerEngine 2.20.2 for MoE layers in JAX, answered by ep.

    PYTHONPATH=examples/recipes python PROGRAM

runs a program of `transformer_engine.jax.ep` or `transformer_engine.jax.moe` on
any device, in float32, bfloat16 or float16. If TransformerEngine is installed,
`import transformer_engine` imports TransformerEngine instead of this package.

The package has the names that docs/howto/replace.md lists, with
TransformerEngine's arguments, results and rounding. Rows are not quantized.
"""

import importlib.machinery
import importlib.util
import os
import sys


def _installed():
  """Returns the spec of TransformerEngine, or None."""
  for folder in sys.path:
    spec = importlib.machinery.PathFinder.find_spec(
      "transformer_engine", [folder]
    )
    if spec and spec.origin and not os.path.samefile(spec.origin, __file__):
      return spec
  return None


if __name__ == "transformer_engine" and (_spec := _installed()):
  sys.modules[__name__] = importlib.util.module_from_spec(_spec)
  _spec.loader.exec_module(sys.modules[__name__])
