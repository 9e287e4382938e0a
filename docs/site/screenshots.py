# SPDX-License-Identifier: Apache-2.0
"""Writes pictures of the site's pages, as a desktop and a phone show them.

    ./bazelw run //docs:screenshots -- --browser=chromium --out=/tmp/pages

It takes any Chromium of this machine, and fails if a page is wider than the
screen of the phone, so that readers would have to scroll sideways. A picture,
phone.png or desktop.png, has the beginnings of all pages beside each other.
"""

import argparse
import html
import json
import pathlib
import re
import subprocess
import sys
import tempfile

# The width of a screen, and how many of them are in a row of the picture. Each
# page is in a frame, because headless Chromium makes no window of fewer than 500
# pixels.
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
  onload = () => {{
    const frames = [...document.querySelectorAll("iframe")];
    document.body.dataset.widths = JSON.stringify(frames.map(
        frame => frame.contentDocument.documentElement.scrollWidth));
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
    widths = show(args.browser, pages, width, columns, picture)
    wide += [
      f"{page.relative_to(args.site.resolve())} is {found} pixels wide on a"
      f" {device} of {width}"
      for page, found in zip(pages, widths, strict=True)
      if found > width
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
  """Writes a picture of pages; returns how wide each is, in pixels."""
  sheet = _SHEET.format(
    sheet=width * columns,
    width=width,
    height=_HEIGHT,
    frames="\n".join(f'<iframe src="{page.as_uri()}"></iframe>' for page in pages),
  )
  rows = -(-len(pages) // columns)
  with tempfile.TemporaryDirectory() as folder:
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
  return json.loads(
    html.unescape(re.search(r'data-widths="(.*?)"', shown)[1])
  )


if __name__ == "__main__":
  sys.exit(main())
