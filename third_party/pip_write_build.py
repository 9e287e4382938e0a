# SPDX-License-Identifier: Apache-2.0
"""Writes the BUILD file of a folder in which pip has installed packages.

Usage: pip_write_build.py FOLDER BUILD_FILE
"""

import importlib.metadata
import pathlib
import re
import sys

_HEADER = """\
load("@rules_python//python:defs.bzl", "py_library")

package(default_visibility = ["//visibility:public"])
"""

_LIBRARY = """
py_library(
    name = "{name}",
    data = {data},
    imports = ["{folder}"],
    deps = {deps},
)
"""


def target_name(package: str) -> str:
  return re.sub(r"[-_.]+", "_", package).lower()


def entries(dist: importlib.metadata.Distribution, folder: str) -> list[str]:
  """Returns the top-level files, folders and programs of a package."""
  found = set()
  for file in dist.files or ():
    if file.parts[0] == "..":  # --target moves ../../bin/x to bin/x
      file = pathlib.PurePosixPath(*(p for p in file.parts if p != ".."))
      found.add(f"{folder}/{file}")
    else:
      found.add(f"{folder}/{file.parts[0]}")
  found.discard(f"{folder}/__pycache__")
  return sorted(name for name in found if pathlib.Path(name).exists())


def requirements(
  dist: importlib.metadata.Distribution, installed: set[str]
) -> list[str]:
  """Returns the packages that `dist` needs on this machine.

  The lock leaves out requirements for other platforms and versions.
  """
  names = set()
  for requirement in dist.requires or ():
    if "extra ==" not in requirement:
      package = re.match(r"[\w.-]+", requirement).group()
      names.add(target_name(package))
  return sorted(f":{name}" for name in names & installed)


def main() -> None:
  folder, build_file = sys.argv[1:]
  for stray in pathlib.Path(folder).rglob("BUILD*"):
    if stray.name in ("BUILD", "BUILD.bazel"):
      stray.unlink()  # it would make a subfolder a Bazel package
  dists = {
    target_name(dist.metadata["Name"]): dist
    for dist in importlib.metadata.distributions(path=[folder])
  }
  text = _HEADER
  for name, dist in sorted(dists.items()):
    text += _LIBRARY.format(
      name=name,
      folder=folder,
      data=entries(dist, folder),
      deps=requirements(dist, set(dists)),
    )
  pathlib.Path(build_file).write_text(text)


if __name__ == "__main__":
  main()
