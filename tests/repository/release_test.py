# SPDX-License-Identifier: Apache-2.0
"""The files of a release agree with each other."""

import ast
import pathlib
import re

import yaml

from docs.site import links

_ROOT = pathlib.Path(__file__).absolute().parents[2]

# The files that contain the version, and the pattern of the version's line.
_VERSIONS = {
  "MODULE.bazel": r'^module\(\n    name = "jax_ep",\n    version = "(.*)",$',
  "ep/__init__.py": r'^__version__ = "(.*?)"',
  "CITATION.cff": r"^version: (.*)$",
}


def test_the_files_have_one_version():
  found = {
    re.search(pattern, (_ROOT / file).read_text(), re.M)[1]
    for file, pattern in _VERSIONS.items()
  }
  assert len(found) == 1


def test_the_registry_tests_a_module_that_uses_this_one():
  presubmit = yaml.safe_load((_ROOT / ".bcr" / "presubmit.yml").read_text())
  module = presubmit["bcr_test_module"]
  folder = _ROOT / module["module_path"]
  calls = [
    {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    for call in ast.walk(ast.parse((folder / "MODULE.bazel").read_text()))
    if isinstance(call, ast.Call)
  ]
  # The registry does not change the test module, which must find the sources.
  override = {"module_name": "jax_ep", "path": "../../.."}
  assert override in calls
  assert (folder / override["path"]).resolve() == _ROOT.resolve()
  for task in module["tasks"].values():
    for placeholder in "platform", "bazel":
      assert task[placeholder] == f"${{{{ {placeholder} }}}}"
      assert module["matrix"][placeholder]


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
