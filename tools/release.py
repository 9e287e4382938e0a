# SPDX-License-Identifier: Apache-2.0
"""Checks and writes the texts of a release; tools/release.sh runs it.

Usage: release.py version
       release.py notes

`version` prints the version, on which several files must agree. `notes` prints
the section of CHANGELOG.md about the version. Each command fails with a message
if the release is not ready.
"""

import argparse
import pathlib
import re
import sys

_ROOT = pathlib.Path(__file__).absolute().parent.parent

# The files that contain the version, and the pattern of the version's line.
_VERSIONS = {
  "MODULE.bazel": r'^module\(\n    name = "jax_ep",\n    version = "(.*)",$',
  "ep/__init__.py": r'^__version__ = "(.*?)"',
  "CITATION.cff": r"^version: (.*)$",
}


def find_version(root: pathlib.Path = _ROOT) -> str:
  """Returns the version.

  Raises:
    ValueError: the files differ.
  """
  found = {
    file: re.search(pattern, (root / file).read_text(), re.M)[1]
    for file, pattern in _VERSIONS.items()
  }
  if len(set(found.values())) > 1:
    each = ", ".join(f"{file} says {v}" for file, v in found.items())
    raise ValueError(f"{each}; write one version into all of them.")
  return found["MODULE.bazel"]


def find_notes(changelog: str, version: str) -> str:
  """Returns the changelog's section about a version, without its heading.

  Raises:
    ValueError: the changelog has no section of this version, an empty one, or
      one without a date.
  """
  sections = re.split(r"^## \[(.*)\](.*)\n", changelog, flags=re.M)
  notes = dict(zip(sections[1::3], sections[3::3], strict=True))
  dates = dict(zip(sections[1::3], sections[2::3], strict=True))
  if not notes.get(version, "").strip():
    raise ValueError(
      f"CHANGELOG.md says nothing about {version}; write a section"
      f" '## [{version}] - YYYY-MM-DD'."
    )
  if not re.fullmatch(r" - \d{4}-\d\d-\d\d", dates[version]):
    raise ValueError(
      f"CHANGELOG.md does not say when {version} is released; write the day of"
      f" the release into its heading, '## [{version}] - YYYY-MM-DD'."
    )
  return notes[version].strip() + "\n"


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("command", choices=["version", "notes"])
  if parser.parse_args().command == "version":
    print(find_version())
  else:
    changelog = (_ROOT / "CHANGELOG.md").read_text()
    print(find_notes(changelog, find_version()), end="")


if __name__ == "__main__":
  try:
    main()
  except ValueError as error:
    sys.exit(f"release.py: {error}")
