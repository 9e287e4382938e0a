# SPDX-License-Identifier: Apache-2.0
"""The texts of a release agree with the script that writes its files."""

import json
import pathlib
import re

from docs.site import links

_ROOT = pathlib.Path(__file__).absolute().parents[2]


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
