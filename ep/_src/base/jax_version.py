# SPDX-License-Identifier: Apache-2.0
"""Refuses a JAX that is too old for the package, on import."""

import jax

_FLOOR = "0.10.2"

if jax.__version_info__ < tuple(map(int, _FLOOR.split("."))):
  raise ImportError(
    f"ep needs jax {_FLOOR} or newer, but jax {jax.__version__} is installed;"
    f' run: pip install --upgrade "jax>={_FLOOR}"',
    name="ep",  # with it, `python -m ep` prints a line in place of a traceback
  )
