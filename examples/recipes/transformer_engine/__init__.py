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
import pathlib
import sys

_here = pathlib.Path(__file__).resolve().parents[1]
_path = [p for p in sys.path if pathlib.Path(p).resolve() != _here]
_installed = importlib.machinery.PathFinder.find_spec(
  "transformer_engine", _path
)
if _installed and __name__ == "transformer_engine":
  sys.modules[__name__] = importlib.util.module_from_spec(_installed)
  _installed.loader.exec_module(sys.modules[__name__])
