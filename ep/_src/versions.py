"""The versions that all processes of a group must have in common."""

from __future__ import annotations

from collections.abc import Iterable
import functools
import hashlib
import pathlib

import jax
import jaxlib

from ep._src import ffi


@functools.cache
def versions(backend: str) -> dict[str, str]:
  """Of what a backend runs on; of our own, digests: builds have no numbers."""
  package = sorted(pathlib.Path(__file__).parent.glob("*.py"))
  found = {
    "the version of jax": jax.__version__,
    "the version of jaxlib": jaxlib.__version__,
    "the digest of the ep package": _digest(package),
  }
  if backend in ffi.PLATFORMS:
    library = ffi.find_library(backend)
    found[f"the digest of {library.name}"] = _digest([library])
  return found


def _digest(files: Iterable[pathlib.Path]) -> str:
  digest = hashlib.sha256()
  for file in files:
    digest.update(file.read_bytes())
  return digest.hexdigest()[:16]
