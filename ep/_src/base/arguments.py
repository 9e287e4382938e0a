# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of public functions.

Each message begins with `what`, the function that the user called. A check
raises `TypeError` if the argument has the wrong type, and `ValueError` if its
value is out of range.

This module does not import JAX, which would delay each launch by 1 s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import itertools
import math
import numbers
import operator
import sys
from typing import Any
import warnings

import numpy as np

INT32_MAX = 2**31 - 1

# `warn` skips stack frames of these packages, to find a line of user code.
_NOT_OF_USERS = ("ep", "jax", "contextlib")


def check(condition: bool, what: str, message: str) -> None:
  if not condition:
    raise ValueError(f"{what}: {message}")


# Returns the value of a field, or raises with a message that begins with the
# function and names the field. The arguments are function, field and value.
Check = Callable[[str, str, Any], Any]


def resolve(what: str, holder: Any, checks: Mapping[str, Check]) -> None:
  """Replaces each field of a frozen object by the result of its check."""
  for field, check_field in checks.items():
    value = check_field(what, field, getattr(holder, field))
    object.__setattr__(holder, field, value)


def optional(check_value: Check) -> Check:
  """Returns a check that also accepts None."""

  def check_optional(what: str, name: str, value: Any) -> Any:
    return None if value is None else check_value(what, name, value)

  return check_optional


def one_of(*choices: str | None) -> Check:
  """Returns a check of a value that has one of a few values."""

  def check_choice(what: str, name: str, value: Any) -> Any:
    check(
      isinstance(value, str | None) and value in choices,
      what,
      f"{name} = {value!r}, but it must be one of {choices}.",
    )
    return value

  return check_choice


def at_least(least: int, words: str = "") -> Check:
  """Returns a check of an integer; `words` say what it must be."""
  words = words or f"at least {least}"

  def check_integer(what: str, name: str, value: Any) -> int:
    result = integer(what, name, value)
    check(result >= least, what, f"{name} = {result}, but it must be {words}.")
    return result

  return check_integer


def integer(what: str, name: str, value: Any) -> int:
  """Returns `value` as an int; refuses bools and ints of more than 32 bits."""
  try:
    if isinstance(value, bool):
      raise TypeError
    result = operator.index(value)
  except TypeError:
    raise wrong_type(what, name, value, "an integer") from None
  check(
    abs(result) <= INT32_MAX,
    what,
    f"{name} = {result}, but it must be less than 2^31: tokens, rows and"
    " experts are counted in 32 bits.",
  )
  return result


def seconds(what: str, name: str, value: Any) -> float:
  """Returns `value`, positive seconds or infinity, as a float."""
  result = _real(what, name, value, "a number of seconds")
  check(
    result > 0,  # False for NaN
    what,
    f"{name} = {value}, but it must be a positive number of seconds; math.inf"
    " waits without limit.",
  )
  return result


def check_address(what: str, name: str, value: Any) -> None:
  """Raises unless `value` is host:port, with a port from 1 to 65535."""
  port = string(what, name, value).rpartition(":")[2]
  check(
    port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16,
    what,
    f"{name} = {value!r}, but it must be a host and a port from 1 to 65535, as"
    " in 10.0.0.1:1234.",
  )


def alignment(what: str, name: str, value: Any) -> int:
  """Returns an alignment in rows; 0 means 1, as in TransformerEngine."""
  words = "a number of rows; 1, like 0, aligns nothing"
  rows: int = at_least(0, words)(what, name, value)
  return max(rows, 1)


def capacity_factor(what: str, name: str, value: Any) -> float:
  """Returns `value`, a capacity factor, as a positive and finite float."""
  factor = number(what, name, value)
  check(
    factor > 0,
    what,
    f"{name} = {factor}, but it must be positive: 1.25 is a quarter"
    " more rows than an even load, None is enough for any routing.",
  )
  return factor


def flag(what: str, name: str, value: Any) -> bool:
  """Returns a Python or NumPy bool as a Python bool."""
  if not isinstance(value, bool | np.bool_):
    raise wrong_type(what, name, value, "True or False")
  return bool(value)


def number(what: str, name: str, value: Any) -> float:
  """Returns `value` as a float; it must be a finite real number."""
  result = _real(what, name, value, "a number")
  check(
    math.isfinite(result),
    what,
    f"{name} = {result}, but it must be a finite number.",
  )
  return result


def _real(what: str, name: str, value: Any, expected: str) -> float:
  """Returns a real number as a float, which is infinite if it is too large."""
  is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
  if not is_real:
    raise wrong_type(what, name, value, expected)
  try:
    return float(value)
  except OverflowError:
    return math.inf if value > 0 else -math.inf


def label(what: str, name: str, value: Any) -> str:
  """Returns `value`, a printable text for messages, records and traces."""
  text = string(what, name, value)
  check(
    text.isprintable(),
    what,
    f"{name} = {text!r}, but it must have no characters that cannot be printed:"
    " messages and records would lose them.",
  )
  return text


def string(what: str, name: str, value: Any) -> str:
  if not isinstance(value, str):
    raise wrong_type(what, name, value, "a string")
  return value


def strings(what: str, name: str, value: Any) -> tuple[str, ...]:
  """Returns a tuple or list of strings as a tuple."""
  if not isinstance(value, tuple | list):
    raise wrong_type(what, name, value, "a tuple of strings")
  return tuple(string(what, f"an element of {name}", x) for x in value)


def check_type(what: str, name: str, value: Any, kind: type, cure: str) -> None:
  """Raises `TypeError` unless `value` is of the class `kind`."""
  if not isinstance(value, kind):
    raise TypeError(
      f"{what}: {name} is a {type(value).__name__}, but the type"
      f" {kind.__name__} is expected; {cure}."
    )


def cannot_pickle(what: str, cure: str) -> TypeError:
  """Returns the error for pickling an object that only this process can use."""
  return TypeError(
    f"{what} cannot be pickled, nor sent to another process: it belongs to the"
    f" connections of this one; {cure}."
  )


def warn(message: str) -> None:
  """Warns at the line of user code that called the package."""
  for level in itertools.count(1):
    module = sys._getframe(level).f_globals.get("__name__", "")
    if module.partition(".")[0] not in _NOT_OF_USERS:
      return warnings.warn(message, stacklevel=level + 1)


def wrong_type(what: str, name: str, value: Any, expected: str) -> TypeError:
  """Returns the error for an argument whose type is not `expected`."""
  return TypeError(
    f"{what}: {name} = {value!r} is a {type(value).__name__}, but {expected} is"
    " expected."
  )
