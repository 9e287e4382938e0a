# SPDX-License-Identifier: Apache-2.0
"""Writes the texts of a release; tools/release.sh runs it.

Usage: release.py version
       release.py notes
       release.py entry FOLDER OWNER/REPO ARCHIVE

`version` prints the version of MODULE.bazel, `notes` what CHANGELOG.md says of
it, and `entry` writes what a Bazel registry stores of it to
FOLDER/modules/jax_ep: the templates of .bcr, filled in.
"""

import base64
import hashlib
import pathlib
import re
import shutil
import sys

_ROOT = pathlib.Path(__file__).absolute().parent.parent


def find_version(root: pathlib.Path = _ROOT) -> str:
  """Returns the version of the module, which the package has as well."""
  module = (root / "MODULE.bazel").read_text()
  (version,) = re.findall(
    r'^module\(\n    name = "jax_ep",\n    version = "(.*)",$', module, re.M
  )
  return version


def find_notes(changelog: str, version: str) -> str:
  """Returns the section of a version, without its heading.

  Raises:
    ValueError: the changelog has no section of this version, or an empty one.
  """
  sections = re.split(r"^## \[(.*)\].*\n", changelog, flags=re.M)
  notes = dict(zip(sections[1::2], sections[2::2], strict=True))
  if not notes.get(version, "").strip():
    raise ValueError(
      f"CHANGELOG.md says nothing about {version}; write a section"
      f" '## [{version}] - YYYY-MM-DD'."
    )
  return notes[version].strip() + "\n"


def write_entry(
  folder: pathlib.Path,
  repository: str,
  archive: pathlib.Path,
  root: pathlib.Path = _ROOT,
) -> None:
  """Writes the module's files of a Bazel registry, for the current version.

  Args:
    folder: The root of the registry.
    repository: The repository on GitHub that has the release, "owner/name".
    archive: The source archive of the release.
    root: The root of the source tree.
  """
  version = find_version(root)
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
    text = (root / ".bcr" / template).read_text()
    for placeholder, value in values.items():
      text = text.replace(placeholder, value)
    target.write_text(text)
  shutil.copy(root / "MODULE.bazel", module / version)
  shutil.copy(root / ".bcr" / "presubmit.yml", module / version)


def main(command: str, *args: str) -> None:
  if command == "version":
    print(find_version())
  elif command == "notes":
    changelog = (_ROOT / "CHANGELOG.md").read_text()
    print(find_notes(changelog, find_version()), end="")
  elif command == "entry":
    folder, repository, archive = args
    write_entry(pathlib.Path(folder), repository, pathlib.Path(archive))
  else:
    sys.exit(f"There is no command {command}.\n{__doc__}")


if __name__ == "__main__":
  main(*sys.argv[1:])
