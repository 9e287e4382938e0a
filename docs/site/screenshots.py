# SPDX-License-Identifier: Apache-2.0
"""Writes pictures of the site's pages, as a desktop and a phone show them.

    ./bazelw run //docs:screenshots -- --browser=chromium --out=/tmp/pages

It takes any Chromium; tools/debian_chromium.sh installs one. It fails if a page
is wider than the screen, so that readers would have to scroll it sideways. A
picture, phone.png or desktop.png, has the beginnings of all pages beside each
other.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile

# The width of a screen, and how many of them are in a row of the picture. Each
# page is in a frame, because headless Chromium makes no window of fewer than
# 500 pixels.
_DEVICES = {"phone": (390, 8), "desktop": (1280, 5)}
_HEIGHT = 1400

_SHEET = """\
<!DOCTYPE html>
<style>
  body {{ margin: 0; display: flex; flex-wrap: wrap; width: {sheet}px }}
  iframe {{ border: 0; width: {width}px; height: {height}px }}
</style>
{frames}
<script>
  // Tables and code may scroll by themselves, but nothing around the title.
  function excess(page) {{
    const root = page.documentElement;
    let most = root.scrollWidth - root.clientWidth;
    for (let box = page.querySelector("h1"); box; box = box.parentElement)
      if (getComputedStyle(box).overflowX == "auto")
        most = Math.max(most, box.scrollWidth - box.clientWidth);
    return most;
  }}
  onload = () => {{
    const frames = [...document.querySelectorAll("iframe")];
    document.body.dataset.excess = JSON.stringify(
        frames.map(frame => excess(frame.contentDocument)));
  }};
</script>
"""


def main() -> int:
  parser = argparse.ArgumentParser()
  parser.add_argument("site", type=pathlib.Path)
  parser.add_argument("--browser", required=True)
  parser.add_argument("--out", type=pathlib.Path, required=True)
  args = parser.parse_args()
  args.out.mkdir(parents=True, exist_ok=True)
  pages = sorted(args.site.resolve().rglob("*.html"))
  wide = []
  for device, (width, columns) in _DEVICES.items():
    picture = args.out.resolve() / f"{device}.png"
    excess = show(args.browser, pages, width, columns, picture)
    wide += [
      f"{page.relative_to(args.site.resolve())} is {pixels} pixels wider than"
      f" the screen of a {device}"
      for page, pixels in zip(pages, excess, strict=True)
      if pixels > 0
    ]
  print("\n".join([*wide, f"{len(pages)} pages are in {args.out}"]))
  return 1 if wide else 0


def show(
  browser: str,
  pages: list[pathlib.Path],
  width: int,
  columns: int,
  picture: pathlib.Path,
) -> list[int]:
  """Writes a picture; returns the pixels of each page that do not fit."""
  sheet = _SHEET.format(
    sheet=width * columns,
    width=width,
    height=_HEIGHT,
    frames="\n".join(f'<iframe src="{p.as_uri()}"></iframe>' for p in pages),
  )
  rows = -(-len(pages) // columns)
  # The browser's processes may still write into it.
  with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
    (file := pathlib.Path(folder, "sheet.html")).write_text(sheet)
    shown = subprocess.run(
      [
        browser,
        *("--headless=new", "--no-sandbox", "--hide-scrollbars"),
        "--allow-file-access-from-files",  # a frame is measured from outside
        f"--user-data-dir={folder}/profile",
        f"--window-size={width * columns},{_HEIGHT * rows}",
        f"--screenshot={picture}",
        "--dump-dom",
        file.as_uri(),
      ],
      check=True,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      text=True,
    ).stdout
  return json.loads(re.search(r'data-excess="(.*?)"', shown)[1])


if __name__ == "__main__":
  sys.exit(main())
