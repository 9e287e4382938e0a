# SPDX-License-Identifier: Apache-2.0
"""Sets up public modules: collects their names, and checks JAX's version."""

from __future__ import annotations

from typing import Any, get_type_hints

_FLOOR = "0.10.2"


def names(module: dict[str, Any]) -> list[str]:
  """Returns the public names of a module's globals, for its `__all__`.

  Also sets the `__module__` of functions and classes of private files to the
  public module, for `help`, tracebacks and pickle.
  """
  private = "ep._src.", "ep._tools.", f"{module['__name__']}._"
  found = sorted(name for name in module if not name.startswith("_"))
  for value in map(module.__getitem__, found):
    if getattr(value, "__module__", "").startswith(private):
      if isinstance(value, type):
        # Text annotations can only be evaluated with the old `__module__`.
        hints = get_type_hints(value)
        value.__annotations__ = {n: hints[n] for n in value.__annotations__}
      value.__module__ = module["__name__"]
  return found


def check_jax() -> None:
  """Raises `ImportError` if JAX is missing or too old."""
  try:
    import jax
  except ModuleNotFoundError as error:
    if error.name != "jax":
      raise
    found = "no jax"
  else:
    if jax.__version_info__ >= tuple(map(int, _FLOOR.split("."))):
      return
    found = f"jax {jax.__version__}"
  raise ImportError(
    f"ep needs jax {_FLOOR} or newer, but {found} is installed;"
    f' run: pip install --upgrade "jax>={_FLOOR}"',
    name="ep",  # so `python -m ep info` prints one line, not a traceback
  )
