# SPDX-License-Identifier: Apache-2.0
"""Checks that the links of Markdown pages lead to tracked files.

Usage: check_links.py PAGE...

Sphinx checks the anchors of links between pages when it builds the site.
"""

import pathlib
import posixpath
import re
import subprocess
import sys

_CODE = re.compile(r"^```.*?^```|`[^`]*`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!\w+:|#)([^)\s]+)\)")


def faults(page: str, text: str, tracked: set[str]) -> list[str]:
  """Returns the links of a page that lead to neither a file nor a folder."""
  folders = {str(p) for path in tracked for p in pathlib.Path(path).parents}
  return [
    f"{page}: {link} leads nowhere"
    for link in _LINK.findall(_CODE.sub("", text))
    if posixpath.normpath(
      posixpath.join(posixpath.dirname(page), link.partition("#")[0])
    )
    not in tracked | folders
  ]


def main(pages: list[str]) -> int:
  listing = subprocess.run(
    ["git", "ls-files", "-z"], check=True, capture_output=True, text=True
  )
  tracked = set(listing.stdout.split("\0"))
  found = [
    fault
    for page in pages
    for fault in faults(page, pathlib.Path(page).read_text(), tracked)
  ]
  print(*found, sep="\n", end="\n" if found else "")
  return bool(found)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
