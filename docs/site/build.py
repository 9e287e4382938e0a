# SPDX-License-Identifier: Apache-2.0
"""Builds the documentation site in the folder OUT: build.py OUT.

The pages are written for a code host. Sphinx reads a changed copy of them:

* README.md, docs/README.md and pages outside of docs/ get other paths.
* A link to a file that is no page leads to the sources, if EP_SOURCE_URL is
  their address (//docs:source_url). Otherwise the path replaces the link.
* A list of names in docs/reference becomes the docstrings of these names, and
  the page begins with a line for each function and class.

A warning of Sphinx is an error.
"""

from collections.abc import Iterator
import inspect
import os
import pathlib
import posixpath
import re
import shutil
import sys
import tempfile
from typing import Any

from sphinx.cmd import build

from docs.site import links
import ep

_ROOT = pathlib.Path(__file__).parent.parent.parent

# Pages and their paths on the site, if these are not their paths in docs/.
_ELSEWHERE = {
  "README.md": "index.md",
  "docs/README.md": "use.md",
  "CHANGELOG.md": "changelog.md",
  "CONTRIBUTING.md": "contributing.md",
  "SECURITY.md": "security.md",
}

_CONTENTS = """
Start: use install tutorial choices
How to: howto/train howto/whole_model howto/finetune howto/decode \
howto/clusters howto/failures howto/replace \
howto/without_accelerators howto/test_a_transport
The layer: moe router sharp_bits errors
Reference: reference/ep reference/moe reference/presets reference/launch \
reference/quant reference/lax reference/testing
Design: semantics architecture performance gpu gpu_results tpu
The project: versions changelog contributing security
"""

_NAME = re.compile(r"^\* `(ep\.[\w.]+)`$", re.MULTILINE)


def main(out: str) -> int:
  with tempfile.TemporaryDirectory() as folder:
    copy_pages(pathlib.Path(folder))
    here = str(pathlib.Path(__file__).parent)
    return build.build_main(
      ["-q", "-W", "--keep-going", "-d", f"{folder}/.doctrees"]
      + ["-c", here, folder, out]
    )


def copy_pages(folder: pathlib.Path) -> None:
  """Writes the changed pages and the images to a folder, for Sphinx."""
  paths = [path.relative_to(_ROOT) for path in _ROOT.glob("docs/**/*.md")]
  places = {str(path): str(path.relative_to("docs")) for path in paths}
  places |= _ELSEWHERE
  for path, place in places.items():
    text = (_ROOT / path).read_text()
    if place.startswith("reference/"):
      start = re.search(r"^(## |\* `)", text, re.MULTILINE).start()
      text = text[:start] + _summary(text) + text[start:]
      text = _NAME.sub(lambda name: _docstring(name[1]), text)
    text = links.change(text, lambda link, path=path: _link(link, path, places))
    if place == "index.md":
      text += "".join(_contents())
    target = folder / place
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
  shutil.copytree(_ROOT / "docs/images", folder / "images")


def _link(link: re.Match, path: str, places: dict[str, str]) -> str:
  """Returns the link on the site for a link of the page `path`."""
  target, hash_, anchor = link["target"].partition("#")
  if not target:
    return link[0]
  target = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
  text = link["text"]
  if target in places or target.startswith("docs/images/"):
    place = places.get(target, target.removeprefix("docs/"))
    start = posixpath.dirname(places[path])
    place = posixpath.relpath(place, start)
    return f"{link['image']}[{text}]({place}{hash_}{anchor})"
  if os.environ.get("EP_SOURCE_URL"):
    return f"[{text}]({os.environ['EP_SOURCE_URL']}/{target})"
  if f"/{target}".endswith("/" + text.strip("`").rstrip("/")):
    return f"`{target}`"
  return f"{text} (`{target}`)"


def _find(name: str) -> tuple[Any, Any]:
  """Returns the class or module of a public name, and its value."""
  owner, value = None, ep
  for part in name.split(".")[1:]:
    owner, value = value, getattr(value, part)
  return owner, value


def _summary(text: str) -> str:
  """Returns a line for each function and class of a page."""
  lines = [
    f"* :py:obj:`{name}`: {inspect.getdoc(value).partition(chr(10))[0]}"
    for name in _NAME.findall(text)
    for owner, value in [_find(name)]
    if callable(value) and not inspect.isclass(owner)
  ]
  return "\n\n```{eval-rst}\n" + "\n".join(lines) + "\n```\n"


def _docstring(name: str) -> str:
  """Returns the directive that shows the docstring of a public name."""
  owner, value = _find(name)
  if inspect.isclass(value):
    kind = "class"
  elif inspect.isfunction(value):
    kind = "method" if inspect.isclass(owner) else "function"
  else:
    kind = "property" if isinstance(value, property) else "data"
  return f"```{{eval-rst}}\n.. auto{kind}:: {name}\n```\n"


def _contents() -> Iterator[str]:
  """Yields the tables of contents for the end of the front page."""
  for line in _CONTENTS.strip().splitlines():
    caption, _, pages = line.partition(": ")
    yield f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n"
    yield "\n".join(pages.split()) + "\n```\n"


if __name__ == "__main__":
  sys.exit(main(sys.argv[1]))
