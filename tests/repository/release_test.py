# SPDX-License-Identifier: Apache-2.0
"""The files of a release agree with each other and with MODULE.bazel."""

import json
import pathlib
import re
import shutil

import pytest

from docs.site import links
from tools import release

_ROOT = pathlib.Path(__file__).absolute().parents[2]
_CHANGELOG = """\
# Changelog

## [Unreleased]

## [1.1.0] - 2026-02-03

### Added

- Rows.

## [1.0.0] - 2026-01-02

First.

[1.1.0]: https://example.com
"""


def test_the_notes_of_a_version_are_its_section():
  assert release.find_notes(_CHANGELOG, "1.1.0") == "### Added\n\n- Rows.\n"
  for version in "1.2.0", "1.1", "Unreleased":
    with pytest.raises(ValueError, match=f"nothing about {version}; write"):
      release.find_notes(_CHANGELOG, version)
  undated = _CHANGELOG.replace("2026-02-03", "unreleased")
  with pytest.raises(ValueError, match="not say when 1.1.0 is released; write"):
    release.find_notes(undated, "1.1.0")
  assert release.find_notes(undated, "1.0.0").startswith("First.")


def test_files_with_other_versions_are_refused(tmp_path):
  for file in release._VERSIONS:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    shutil.copy(_ROOT / file, tmp_path / file)
  version = release.find_version(tmp_path)
  assert version == release.find_version()
  (tmp_path / "CITATION.cff").write_text("version: 9.9.9\n")
  with pytest.raises(ValueError, match="CITATION.cff says 9.9.9; write one"):
    release.find_version(tmp_path)


def test_a_registry_gets_the_archive_of_a_release():
  source = (_ROOT / ".bcr" / "source.template.json").read_text()
  source = json.loads(source.replace("{VERSION}", "$version"))
  script = (_ROOT / "tools" / "release.sh").read_text()
  assert f"archive=$folder/{source['url'].rpartition('/')[2]}\n" in script
  assert f'--prefix="{source["strip_prefix"]}/"' in script


def test_the_page_of_an_index_links_to_the_sources():
  """Links to files become absolute links or plain text; code stays."""
  readme = (_ROOT / "README.md").read_text()
  url = "https://example.com/ep/blob/v1"
  linked = links.make_absolute(readme, "README.md", url)
  assert (
    "![Tokens" in linked
    and f"({url}/docs/images/layout.svg?raw=true)" in linked
  )
  assert f"[Tutorial]({url}/docs/tutorial.md)" in linked
  assert f"[not run there]({url}/README.md#status)" in linked
  assert (
    linked.replace(f"{url}/", "")
    .replace("?raw=true", "")
    .replace("(README.md#", "(#")
    == readme
  )
  text = links.make_absolute(readme, "README.md", "")
  assert "\nTutorial · Which backend" in text and "layout.svg" not in text
  relative = re.compile(r"\]\((?!https:)")
  assert relative.search(readme)
  assert not relative.search(linked) and not relative.search(text)
