# SPDX-License-Identifier: Apache-2.0
"""Writes pictures of the site's pages, as a desktop and a phone show them.

    ./bazelw run //docs:screenshots -- --browser=chromium --out=/tmp/pages

It takes any Chromium on this machine. CI has none, because a browser is several
times as large as everything else that it fetches.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

# Headless Chromium makes no window of fewer than 500 pixels.
_WIDTHS = {"desktop": 1280, "phone": 500}


def main() -> int:
  parser = argparse.ArgumentParser()
  parser.add_argument("site", type=pathlib.Path)
  parser.add_argument("--browser", required=True)
  parser.add_argument("--out", type=pathlib.Path, required=True)
  parser.add_argument("--height", type=int, default=2000)
  args = parser.parse_args()
  args.out.mkdir(parents=True, exist_ok=True)
  site = args.site.resolve()
  for page in sorted(site.rglob("*.html")):
    name = str(page.relative_to(site).with_suffix("")).replace("/", "_")
    for device, width in _WIDTHS.items():
      with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
          [
            args.browser,
            *("--headless=new", "--no-sandbox", "--hide-scrollbars"),
            f"--user-data-dir={profile}",
            f"--window-size={width},{args.height}",
            f"--screenshot={args.out / f'{name}_{device}.png'}",
            page.as_uri(),
          ],
          check=True,
          stderr=subprocess.DEVNULL,
        )
  return 0


if __name__ == "__main__":
  sys.exit(main())
