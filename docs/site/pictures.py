# SPDX-License-Identifier: Apache-2.0
"""Draws docs/images/layout.svg: ./bazelw run //docs:pictures.

The picture shows the worked example of docs/semantics.md. The reference assigns
the slots. tests/repository/pages_test.py compares the file with the drawing.
"""

import os
import pathlib

import numpy as np

from ep._src.ops import reference

# Okabe and Ito's colors, which color-blind people can distinguish.
_BLUE, _ORANGE, _GREEN, _PINK = "#0072b2", "#e69f00", "#009e73", "#cc79a7"
_COLORS = _BLUE, _ORANGE, _GREEN, _PINK
_INK, _GRAY, _PALE = "#222", "#888", "#e4e4e4"


class Svg:
  """A drawing, in units of pixels from its upper left corner."""

  def __init__(self, width: int, height: int, title: str):
    self._parts = [
      f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
      f' width="{width}" height="{height}" role="img"'
      ' font-family="sans-serif" font-size="13">',
      f"<title>{title}</title>",
      f'<rect width="{width}" height="{height}" rx="6" fill="#fff"/>',
    ]

  def rect(self, x, y, w, h, fill, **more):
    self._add("rect", None, x=x, y=y, width=w, height=h, fill=fill, **more)

  def text(self, x, y, text, anchor="start", fill=_INK, **more):
    more = {"text-anchor": anchor, "fill": fill} | more
    self._add("text", text, x=x, y=y, **more)

  def curve(self, x1, y1, x2, y2, color):
    """Draws a line that leaves and arrives horizontally."""
    middle = (x1 + x2) / 2
    d = f"M{x1:g} {y1:g}C{middle:g} {y1:g} {middle:g} {y2:g} {x2:g} {y2:g}"
    self._add("path", None, d=d, stroke=color, fill="none", stroke_width=2)

  def _add(self, tag, text, **attributes):
    found = "".join(
      f' {name.replace("_", "-")}="{self._value(value)}"'
      for name, value in attributes.items()
    )
    end = "/>" if text is None else f">{text}</{tag}>"
    self._parts.append(f"<{tag}{found}{end}")

  @staticmethod
  def _value(value) -> str:
    return value if isinstance(value, str) else f"{value:g}"

  def __str__(self) -> str:
    return "\n".join([*self._parts, "</svg>", ""])


def layout() -> Svg:
  """Draws dispatch and combine of the worked example."""
  topk_idx = np.array([[[0, 2], [0, 3]], [[0, 1], [2, -1]]])
  routing = reference.prepare(topk_idx, num_experts=4, capacity=10, alignment=2)
  svg = Svg(640, 372, "Tokens of two ranks, sorted into expert segments")
  cell, left, middle, right = 22, 30, 270, 530
  tops = 64, 226  # of the ranks
  for x, title in (
    (left, "tokens"),
    (middle, "expert segments"),
    (right, "results"),
  ):
    svg.text(x, 24, title, font_weight="bold")
  svg.text(195, 24, "ep_dispatch", "middle", _GRAY)
  svg.text(455, 24, "ep_combine", "middle", _GRAY)

  def token_y(rank, token):
    return tops[rank] + 20 + 44 * token

  def slot_y(rank, slot):
    return tops[rank] + cell * slot

  for rank, top in enumerate(tops):
    for x in left, middle, right:
      svg.text(x, top - 10, f"rank {rank}", fill=_GRAY)
    rows = int(routing.group_sizes[rank].sum())
    for row in range(rows):  # padding, which tokens then cover
      svg.rect(middle, slot_y(rank, row), 80, cell - 3, _PALE)
    offset = 0
    for local, size in enumerate(routing.group_sizes[rank].tolist()):
      y = slot_y(rank, offset)
      svg.rect(
        *(middle - 3, y - 3, 150, cell * size + 2, "none"), stroke=_INK, rx=3
      )
      svg.text(middle + 88, y + 14, f"expert {2 * rank + local}", font_size=12)
      offset += size
  for rank, token in np.ndindex(2, 2):
    name, color = "abcd"[2 * rank + token], _COLORS[2 * rank + token]
    y = token_y(rank, token)
    for k, expert in enumerate(topk_idx[rank, token].tolist()):
      if expert < 0:
        continue
      to = int(routing.rank[rank, token, k])
      slot_top = slot_y(to, int(routing.slot[rank, token, k]))
      half = slot_top + (cell - 3) / 2
      svg.curve(left + 90, y + 13, middle - 4, half, color)
      svg.curve(middle + 148, half, right - 2, y + 13, color)
      svg.rect(middle, slot_top, 80, cell - 3, color)
      svg.text(middle + 40, slot_top + 14, name, "middle", "#fff")
    for x in left, right:
      svg.rect(x, y, 90, 26, color, rx=3)
    chosen = ", ".join(str(e) for e in topk_idx[rank, token] if e >= 0)
    svg.text(left + 45, y + 17, f"{name}: {chosen}", "middle", "#fff")
    svg.text(right + 45, y + 17, f"sum of {name}", "middle", "#fff")
  svg.text(left, 358, "a: 0, 2 is a token and the experts that it chose.")
  svg.rect(middle + 90, 346, 28, 16, _PALE)
  svg.text(middle + 126, 358, "pads a segment to a multiple of 2.")
  return svg


def main() -> None:
  root = pathlib.Path(os.environ["BUILD_WORKSPACE_DIRECTORY"])
  (root / "docs/images/layout.svg").write_text(str(layout()))


if __name__ == "__main__":
  main()
