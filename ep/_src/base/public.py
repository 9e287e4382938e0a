# SPDX-License-Identifier: Apache-2.0
"""Makes the names of a public module its own, wherever they are defined."""

from __future__ import annotations

from typing import Any, get_type_hints


def names(module: dict[str, Any]) -> list[str]:
  """Returns the public names of a module's globals, for its `__all__`.

  Functions and classes of ep/_src, ep/_tools and the module's private files are
  members of the module: in `help`, in tracebacks, and when they are pickled.
  """
  private = "ep._src.", "ep._tools.", f"{module['__name__']}._"
  found = sorted(name for name in module if not name.startswith("_"))
  for value in map(module.__getitem__, found):
    if getattr(value, "__module__", "").startswith(private):
      if isinstance(value, type):
        # As text, they would be looked up in the public module.
        hints = get_type_hints(value)
        value.__annotations__ = {n: hints[n] for n in value.__annotations__}
      value.__module__ = module["__name__"]
  return found
