# SPDX-License-Identifier: Apache-2.0
"""Finds files of Bazel's runfiles and of installed packages."""

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
  return _existing(place and pathlib.Path(place))


def in_package(package: str, path: str) -> pathlib.Path | None:
  """Returns the path of an installed package's file, or None.

  Does not import the package.
  """
  try:
    spec = importlib.util.find_spec(package)
  except ModuleNotFoundError:  # there is no parent package
    return None
  for folder in (spec and spec.submodule_search_locations) or ():
    if found := _existing(pathlib.Path(folder, path)):
      return found
  return None


def _existing(path: pathlib.Path | None) -> pathlib.Path | None:
  return path if path and path.exists() else None
