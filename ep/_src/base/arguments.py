# SPDX-License-Identifier: Apache-2.0
"""Checks what users pass, and names the argument that is wrong.

This module does not import JAX, which would take a second of every launch.
"""

from __future__ import annotations

import itertools
import math
import numbers
import operator
import sys
from typing import Any
import warnings

import numpy as np

INT32_MAX = 2**31 - 1

# The package itself, the package through which it calls its own functions, and
# the module whose functions leave its contexts.
_NOT_OF_USERS = ("ep", "jax", "contextlib")


def check(condition: bool, what: str, message: str) -> None:
  """Raises `ValueError` with a message that begins with `what`, or returns."""
  if not condition:
    raise ValueError(f"{what}: {message}")


def check_choices(what: str, values: Any, **choices: Any) -> None:
  """Raises `ValueError` if an attribute of `values` is none of its choices."""
  for field, allowed in choices.items():
    value = getattr(values, field)
    check(
      isinstance(value, str | None) and value in allowed,
      what,
      f"{field} = {value!r}, but it must be one of {allowed}.",
    )


def integer(what: str, name: str, value: Any) -> int:
  """Returns an argument that is an integer of any type as an `int`.

  Raises, with a message that begins with `what`:
    TypeError: it is no integer, or it is a bool.
    ValueError: it does not fit into 32 bits.
  """
  try:
    if isinstance(value, bool):
      raise TypeError
    result = operator.index(value)
  except TypeError:
    raise wrong_type(what, name, value, "an integer") from None
  if abs(result) > INT32_MAX:
    raise ValueError(
      f"{what}: {name} = {result}, but it must be less than 2^31: tokens, rows"
      " and experts are counted in 32 bits."
    )
  return result


def seconds(what: str, name: str, value: Any) -> float:
  """Returns an argument that is a positive time, perhaps infinite.

  Raises, with a message that begins with `what`:
    TypeError: it is no number.
    ValueError: it is not positive, or NaN.
  """
  if isinstance(value, bool) or not isinstance(value, numbers.Real):
    raise wrong_type(what, name, value, "a number of seconds")
  result = float(value)
  if not result > 0:  # as NaN is not
    raise ValueError(
      f"{what}: {name} = {value}, but it must be a positive number of seconds;"
      " math.inf waits without limit."
    )
  return result


def check_address(what: str, name: str, value: Any) -> None:
  """Raises unless an argument is a host and a port, as host:port.

  Raises, with a message that begins with `what`:
    TypeError: it is no string.
    ValueError: it has no port from 1 to 65535.
  """
  port = string(what, name, value).rpartition(":")[2]
  check(
    port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16,
    what,
    f"{name} = {value!r}, but it must be a host and a port from 1 to 65535, as"
    " in 10.0.0.1:1234.",
  )


def alignment(what: str, value: Any) -> int:
  """Returns an alignment in rows; 0 means none, as in TransformerEngine.

  Raises, with a message that begins with `what`:
    TypeError: it is no integer.
    ValueError: it is negative.
  """
  rows = integer(what, "alignment", value)
  check(
    rows >= 0,
    what,
    f"alignment = {rows}, but it must be a number of rows; 1, like 0, aligns"
    " nothing.",
  )
  return max(rows, 1)


def capacity_factor(what: str, value: Any) -> float:
  """Returns an argument that is a capacity divided by an even load.

  Raises, with a message that begins with `what`:
    TypeError: it is no number.
    ValueError: it is not positive, or not finite.
  """
  factor = number(what, "capacity_factor", value)
  check(
    factor > 0,
    what,
    f"capacity_factor = {factor}, but it must be positive: 1.25 leaves room for"
    " a quarter more rows than an even load, None for any routing.",
  )
  return factor


def flag(what: str, name: str, value: Any) -> bool:
  """Returns an argument that is a bool, or raises `TypeError`."""
  if not isinstance(value, bool | np.bool_):
    raise wrong_type(what, name, value, "True or False")
  return bool(value)


def flags(what: str, **values: Any) -> None:
  """Raises `TypeError` unless all of the arguments are bools."""
  for name, value in values.items():
    flag(what, name, value)


def number(what: str, name: str, value: Any) -> float:
  """Returns an argument that is a finite real number.

  Raises, with a message that begins with `what`:
    TypeError: it is no number.
    ValueError: it is NaN or infinite.
  """
  if isinstance(value, bool) or not isinstance(value, numbers.Real):
    raise wrong_type(what, name, value, "a number")
  check(
    math.isfinite(value),
    what,
    f"{name} = {value}, but it must be a finite number.",
  )
  return float(value)


def label(what: str, value: Any) -> str:
  """Returns a name for messages, records and traces.

  Raises, with a message that begins with `what`:
    TypeError: it is no string.
    ValueError: it has characters that do not print, such as NUL.
  """
  name = string(what, "name", value)
  check(
    name.isprintable(),
    what,
    f"name = {name!r}, but it must have no characters that cannot be printed:"
    " messages and records would lose them.",
  )
  return name


def string(what: str, name: str, value: Any) -> str:
  """Returns an argument that is a string, or raises `TypeError`."""
  if not isinstance(value, str):
    raise wrong_type(what, name, value, "a string")
  return value


def strings(what: str, name: str, value: Any) -> tuple[str, ...]:
  """Returns an argument that is a tuple or list of strings as a tuple."""
  if not isinstance(value, tuple | list):
    raise wrong_type(what, name, value, "a tuple of strings")
  return tuple(string(what, f"an element of {name}", x) for x in value)


def cannot_pickle(what: str, cure: str) -> TypeError:
  """Returns the error of pickling what belongs to this process."""
  return TypeError(
    f"{what} cannot be pickled, nor sent to another process: it belongs to the"
    f" connections of this one; {cure}."
  )


def warn(message: str) -> None:
  """Warns at the line of the user that called the package."""
  for level in itertools.count(1):
    module = sys._getframe(level).f_globals.get("__name__", "")
    if module.partition(".")[0] not in _NOT_OF_USERS:
      return warnings.warn(message, stacklevel=level + 1)


def is_integral(value: Any) -> bool:
  """Returns whether a value is an integer, or an array of them."""
  return isinstance(value, int) or np.asarray(value).dtype.kind in "iu"


def wrong_type(what: str, name: str, value: Any, expected: str) -> TypeError:
  """Returns the error of an argument that is not what is expected."""
  return TypeError(
    f"{what}: {name} = {value!r} is a {type(value).__name__}, but {expected} is"
    " expected."
  )
