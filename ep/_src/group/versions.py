# SPDX-License-Identifier: Apache-2.0
"""Versions and compiler options, which all processes must have in common."""

from __future__ import annotations

from collections.abc import Iterable
import functools
import hashlib
import os
import pathlib
import shlex

import jax
import jaxlib

from ep._src.base import compat
from ep._src.native import ffi

# These flags of XLA do not change the compiled program.
_HARMLESS_FLAGS = ("--xla_force_host_platform_device_count", "--xla_dump_")


@functools.cache
def versions(backend: str) -> dict[str, str]:
  """Returns the versions of the software that a backend runs on, by name.

  Our own files have no version number: digests stand for it.
  """
  package = sorted(pathlib.Path(__file__).parents[2].rglob("*.py"))
  found = {
    "the version of jax": jax.__version__,
    "the version of jaxlib": jaxlib.__version__,
    "the digest of the ep package": _digest(package),
  }
  if backend in ffi.PLATFORMS:
    library = ffi.find_library(backend)
    found[f"the digest of {library.name}"] = _digest([library])
  return found


def compiler_settings() -> dict[str, str]:
  """Returns the options that XLA gets for every program, by name.

  XLA may make several copies of an op (a jitted function that is called twice),
  and ops of ranks are matched by the order of the copies, which the compiler
  decides.
  """
  return {"XLA_FLAGS": _xla_flags(), **compat.compiler_options()}


def _xla_flags() -> str:
  text = os.environ.get("XLA_FLAGS", "").strip()
  if text and not text.startswith("-"):  # it names a file of flags
    text = pathlib.Path(text).read_text()
  flags = shlex.split(text)
  last = {flag.partition("=")[0]: flag for flag in flags}
  names = [n for n in sorted(last) if not n.startswith(_HARMLESS_FLAGS)]
  return " ".join(last[name] for name in names) or "(none)"


def _digest(files: Iterable[pathlib.Path]) -> str:
  digest = hashlib.sha256()
  for file in files:
    digest.update(file.read_bytes())
  return digest.hexdigest()[:16]
