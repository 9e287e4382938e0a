# SPDX-License-Identifier: Apache-2.0
"""Refuses a JAX that is missing or too old for the package, on import."""

_FLOOR = "0.10.2"

try:
  import jax
except ModuleNotFoundError as error:
  if error.name != "jax":
    raise
  _found = None
else:
  _found = jax.__version_info__

if _found is None or _found < tuple(map(int, _FLOOR.split("."))):
  found = f"jax {jax.__version__}" if _found else "no jax"
  raise ImportError(
    f"ep needs jax {_FLOOR} or newer, but {found} is installed;"
    f' run: pip install --upgrade "jax>={_FLOOR}"',
    name="ep",  # with it, `python -m ep check` prints a line in place of a traceback
  )
