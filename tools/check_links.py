# SPDX-License-Identifier: Apache-2.0
"""Checks that the links of Markdown pages lead to files.

Usage: check_links.py PAGE...

Sphinx checks the anchors of links between pages when it builds the site.
"""

import pathlib
import re
import sys

_CODE = re.compile(r"^```.*?^```|`[^`]*`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!\w+:|#)([^)\s#]+)")

if __name__ == "__main__":
  found = [
    f"{page}: {link} leads nowhere"
    for page in map(pathlib.Path, sys.argv[1:])
    for link in _LINK.findall(_CODE.sub("", page.read_text()))
    if not (page.parent / link).exists()
  ]
  sys.exit("\n".join(found) or 0)
