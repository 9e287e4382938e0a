# SPDX-License-Identifier: Apache-2.0
"""Changes the links of Markdown pages, which are written for a code host."""

from collections.abc import Callable
import re

_LINK = re.compile(
  r"(?P<code>^```.*?^```|`[^`]+`)"
  r"|(?P<image>!?)\[(?P<text>[^]]*)\]\((?P<target>[^)\s]+)\)",
  re.MULTILINE | re.DOTALL,
)


def change(page: str, new: Callable[[re.Match[str]], str]) -> str:
  """Returns a page with `new(link)` for each link inside of the repository.

  The groups of a link are `image`, which is "!" or empty, `text` and `target`.
  Code, and links to other hosts, stay as they are.
  """

  def replace(link: re.Match[str]) -> str:
    foreign = link["code"] or re.match(r"\w+:", link["target"])
    return link[0] if foreign else new(link)

  return _LINK.sub(replace, page)


def make_absolute(page: str, name: str, source_url: str) -> str:
  """Returns a page whose links work on any site.

  Args:
    page: text of a page in the root of the repository.
    name: name of the page.
    source_url: the address of the sources, https://host/name/blob/tag. If it is
      empty, texts replace links, and images are removed.
  """

  def link_to_sources(link: re.Match[str]) -> str:
    if not source_url:
      return "" if link["image"] else link["text"]
    target = link["target"]
    if target.startswith("#"):
      target = name + target
    raw = "?raw=true" if link["image"] else ""
    return f"{link['image']}[{link['text']}]({source_url}/{target}{raw})"

  return change(page, link_to_sources)
