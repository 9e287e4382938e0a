# SPDX-License-Identifier: Apache-2.0
"""The built site is whole: site_test.py FOLDER.

Each link of a page leads to a page, and to a place there if it names one. No
page loads anything from elsewhere. Each page fits a phone, because it tells the
browser so.
"""

from html.parser import HTMLParser
import pathlib
import posixpath
import sys
import urllib.parse
import xml.etree.ElementTree as ElementTree

# Attributes of these tags load what they name; other links wait for a reader.
_LOADS = {"img", "script", "link", "iframe", "source"}


class Page(HTMLParser):
  """The anchors and links of a page.

  Attributes:
    anchors: the ids of its elements.
    links: pairs of a tag and what its `href` or `src` names.
    has_viewport: whether the page adapts to the width of a phone.
  """

  def __init__(self, path: pathlib.Path):
    super().__init__()
    self.anchors, self.links, self.has_viewport = set(), [], False
    self.feed(path.read_text())

  def handle_starttag(self, tag, attrs):
    attrs = dict(attrs)
    if "id" in attrs:
      self.anchors.add(attrs["id"])
    self.links += [(tag, attrs[k]) for k in ("href", "src") if attrs.get(k)]
    if attrs.get("name") == "viewport":
      self.has_viewport |= "width=device-width" in attrs["content"]


def faults(folder: pathlib.Path):
  """Yields what is wrong with the site, a sentence for each fault."""
  pages = {
    str(path.relative_to(folder)): Page(path) for path in folder.rglob("*.html")
  }
  for name, page in pages.items():
    if not page.has_viewport:
      yield f"{name} does not adapt to the width of a phone"
    for tag, link in page.links:
      parts = urllib.parse.urlsplit(link)
      if parts.scheme or parts.netloc:
        if tag in _LOADS:
          yield f"{name} loads {link}"
        continue
      path = urllib.parse.unquote(parts.path)
      target = posixpath.normpath(
        posixpath.join(posixpath.dirname(name), path) if path else name
      )
      if not (folder / target).is_file():
        yield f"{name}: {link} leads nowhere"
      elif (
        parts.fragment
        and target in pages
        and urllib.parse.unquote(parts.fragment) not in pages[target].anchors
      ):
        yield f"{name}: {link} leads nowhere in {target}"
  for picture in folder.rglob("*.svg"):
    ElementTree.parse(picture)  # a browser shows nothing of a broken one
  if not {"index.html", "tutorial.html", "reference/ep.html"} <= pages.keys():
    yield f"{folder} has only {sorted(pages)}"


def main() -> int:
  found = sorted(set(faults(pathlib.Path(sys.argv[1]))))
  print("\n".join(found))
  return bool(found)


if __name__ == "__main__":
  sys.exit(main())
