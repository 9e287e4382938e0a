# SPDX-License-Identifier: Apache-2.0
"""Finds files among Bazel's runfiles and in installed packages."""

from __future__ import annotations

import importlib.util
import pathlib


def in_runfiles(path: str) -> pathlib.Path | None:
  """Returns the path of a Bazel runfile "repository/path", or None."""
  try:
    from python.runfiles import runfiles
  except ImportError:
    return None
  found = runfiles.Create()
  place = found and found.Rlocation(path, source_repo=found.CurrentRepository())
  return pathlib.Path(place) if place and pathlib.Path(place).exists() else None


def in_package(package: str, path: str) -> pathlib.Path | None:
  """Finds a file of a package without importing it; returns a path or None."""
  try:
    spec = importlib.util.find_spec(package)
  except ModuleNotFoundError:  # the parent package is missing
    return None
  for folder in (spec and spec.submodule_search_locations) or ():
    if (file := pathlib.Path(folder, path)).exists():
      return file
  return None
