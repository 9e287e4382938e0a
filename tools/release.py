# SPDX-License-Identifier: Apache-2.0
"""Checks and writes the texts of a release; tools/release.sh runs it.

Usage: release.py version
       release.py notes
       release.py maintainers
       release.py entry FOLDER OWNER/REPO ARCHIVE

`version` prints the version, on which several files must agree. `notes` prints
the section of CHANGELOG.md about the version. `maintainers` prints the
maintainers for a Bazel registry. `entry` fills in the templates of .bcr and
writes the entry of the version in a Bazel registry to FOLDER/modules/jax_ep.
Each command fails with a message if the release is not ready.
"""

import base64
import hashlib
import json
import pathlib
import re
import shutil
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


def find_maintainers(root: pathlib.Path = _ROOT) -> list[str]:
  """Returns the names of the maintainers for a Bazel registry.

  Raises:
    ValueError: the template names no maintainers.
  """
  template = root / ".bcr" / "metadata.template.json"
  names = [m["name"] for m in json.loads(template.read_text())["maintainers"]]
  if not names:
    raise ValueError(
      ".bcr/metadata.template.json names no maintainers, whom a registry"
      " demands; fill them in as CONTRIBUTING.md says."
    )
  return names


def write_entry(
  folder: pathlib.Path, repository: str, archive: pathlib.Path
) -> None:
  """Writes the entry of the current version in a Bazel registry.

  Args:
    folder: The root of the registry.
    repository: The repository on GitHub that has the release, "owner/name".
    archive: The source archive of the release.
  """
  version = find_version()
  owner, name = repository.split("/")
  digest = base64.b64encode(hashlib.sha256(archive.read_bytes()).digest())
  values = {
    "{INTEGRITY}": "sha256-" + digest.decode(),
    "{OWNER}": owner,
    "{REPO}": name,
    "{VERSION}": version,
  }
  module = folder / "modules" / "jax_ep"
  (module / version).mkdir(parents=True)
  for template, target in [
    ("metadata.template.json", module / "metadata.json"),
    ("source.template.json", module / version / "source.json"),
  ]:
    text = (_ROOT / ".bcr" / template).read_text()
    for placeholder, value in values.items():
      text = text.replace(placeholder, value)
    target.write_text(text)
  shutil.copy(_ROOT / "MODULE.bazel", module / version)
  shutil.copy(_ROOT / ".bcr" / "presubmit.yml", module / version)


def main(command: str, *args: str) -> None:
  if command == "version":
    print(find_version())
  elif command == "notes":
    changelog = (_ROOT / "CHANGELOG.md").read_text()
    print(find_notes(changelog, find_version()), end="")
  elif command == "maintainers":
    print("\n".join(find_maintainers()))
  elif command == "entry":
    folder, repository, archive = args
    write_entry(pathlib.Path(folder), repository, pathlib.Path(archive))
  else:
    raise ValueError(f"There is no command {command}.\n{__doc__}")


if __name__ == "__main__":
  try:
    main(*sys.argv[1:])
  except ValueError as error:
    sys.exit(f"release.py: {error}")
