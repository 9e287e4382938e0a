# SPDX-License-Identifier: Apache-2.0
"""Builds a wheel or an sdist from files of Bazel.

Usage: build_distribution.py wheel|sdist FOLDER --platform=TAG
  [--source_url=URL] [--substitute=NAME=VALUE]... PATH=SOURCE...

Copies each SOURCE to its PATH in a new source tree, and runs Hatchling there as
pip does. Replaces @NAME@ in pyproject.toml by the VALUE, and @VERSION@ by the
version of the package. Makes the links of README.md absolute, because package
indexes show the page alone.
"""

import argparse
import os
import pathlib
import re
import shutil
import tempfile

import hatchling.build

from docs.site import links

_README = "README.md"


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("kind", choices=["wheel", "sdist"])
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("--platform", required=True)
  parser.add_argument("--source_url", default="")
  parser.add_argument("--substitute", action="append", default=[])
  parser.add_argument("files", nargs="+")
  args = parser.parse_args()
  folder = args.folder.resolve()
  with tempfile.TemporaryDirectory() as tree:
    for file in args.files:
      path, _, source = file.partition("=")
      target = pathlib.Path(tree, path)
      target.parent.mkdir(parents=True, exist_ok=True)
      shutil.copyfile(source, target)
    os.chdir(tree)
    substitute(dict(pair.split("=") for pair in args.substitute))
    if (readme := pathlib.Path(_README)).exists():
      page = readme.read_text()
      readme.write_text(links.make_absolute(page, _README, args.source_url))
    # sysconfig returns this value to native_library.py as the platform.
    os.environ["_PYTHON_HOST_PLATFORM"] = args.platform
    getattr(hatchling.build, f"build_{args.kind}")(str(folder))


def substitute(values: dict[str, str]) -> None:
  """Replaces the placeholders of pyproject.toml in the current folder."""
  package = pathlib.Path("ep/__init__.py").read_text()
  (version,) = re.findall(r'^__version__ = "(.*?)"', package, re.M)
  project = pathlib.Path("pyproject.toml")
  text = project.read_text()
  for name, value in {**values, "VERSION": version}.items():
    text = text.replace(f"@{name}@", value)
  project.write_text(text)


if __name__ == "__main__":
  main()
