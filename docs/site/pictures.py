# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of the pages: ./bazelw run //docs:pictures.

The layout is that of the worked example in docs/semantics.md, placed by the
reference. The load is that of the routing in docs/howto/capacity.md. The plots
show tables of docs/performance.md. tests/repository/pages_test.py requires that
docs/images has what this program draws.
"""

from collections.abc import Iterable
import math
import os
import pathlib
import re

import numpy as np

from ep._src.ops import reference

_ROOT = pathlib.Path(__file__).parent.parent.parent

# Okabe and Ito's colors, which people with any color vision can tell apart.
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

  def line(self, x1, y1, x2, y2, color, **more):
    self._add("line", None, x1=x1, y1=y1, x2=x2, y2=y2, stroke=color, **more)

  def curve(self, x1, y1, x2, y2, color):
    """Draws a line that leaves and arrives horizontally."""
    middle = (x1 + x2) / 2
    d = f"M{x1:g} {y1:g}C{middle:g} {y1:g} {middle:g} {y2:g} {x2:g} {y2:g}"
    self._add("path", None, d=d, stroke=color, fill="none", stroke_width=2)

  def polyline(self, points: Iterable[tuple[float, float]], color):
    points = " ".join(f"{x:g},{y:g}" for x, y in points)
    self._add(
      "polyline", None, points=points, fill="none", stroke=color, stroke_width=2
    )

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
  svg = Svg(640, 372, "Tokens of two ranks, sorted into the slabs of experts")
  cell, left, middle, right = 22, 30, 270, 530
  tops = 64, 226  # of the ranks
  for x, title in (left, "tokens"), (middle, "slabs"), (right, "results"):
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
    for row in range(rows):  # padding, where no token comes
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
  svg.text(middle + 126, 358, "pads a slab to a multiple of 2.")
  return svg


def expert_load() -> Svg:
  """Draws the choices and loads of the routing that the page computes."""
  ranks, experts, tokens, top_k = 4, 8, 64, 2
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(ranks * tokens, experts)) - 0.2 * np.arange(experts)
  chosen = np.argsort(-logits, axis=1)[:, :top_k].reshape(ranks, -1)
  choices = np.stack([np.bincount(c, minlength=experts) for c in chosen])
  loads = choices.sum(0).reshape(ranks, -1).sum(1)
  svg = Svg(560, 330, "Choices of each expert, and rows of each rank")
  svg.text(20, 24, "choices of each expert, by source rank", font_weight="bold")
  for rank, expert in np.ndindex(ranks, experts):
    count = int(choices[rank, expert])
    shade = count / choices.max()
    x, y = 80 + 56 * expert, 36 + 24 * rank
    svg.rect(x, y, 54, 22, _BLUE, fill_opacity=round(shade, 2))
    color = "#fff" if shade > 0.5 else _INK
    svg.text(x + 27, y + 16, str(count), "middle", color)
  for rank in range(ranks):
    svg.text(20, 52 + 24 * rank, f"rank {rank}")
    svg.text(20, 220 + 26 * rank, f"rank {rank}")
  for expert in range(experts):
    svg.text(107 + 56 * expert, 148, f"expert {expert}", "middle", _GRAY)
  svg.text(20, 188, "rows that each rank needs", font_weight="bold")
  scale = 446 / 280
  for rank, rows in enumerate(loads.tolist()):
    svg.rect(80, 205 + 26 * rank, rows * scale, 20, _BLUE)
    svg.text(86, 220 + 26 * rank, str(rows), fill="#fff")
  for rows, what in (128, "even load"), (160, "capacity_factor=1.25"):
    x = 80 + rows * scale
    svg.line(x, 200, x, 312, _ORANGE, stroke_width=2)
    anchor = "end" if rows == 128 else "start"
    svg.text(x + (-5 if rows == 128 else 5), 318, what, anchor, _INK)
  return svg


def _tables(title: str) -> list[list[list[str]]]:
  """Returns the tables of a section of performance.md, as rows of cells."""
  page = (_ROOT / "docs/performance.md").read_text()
  section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
  return [
    [
      [cell.strip() for cell in line.strip("|\n").split("|")]
      for line in table.splitlines()
    ]
    for table in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
  ]


def round_trips() -> Svg:
  """Draws the times of float32 round trips, beside the best XLA's."""
  rows = [
    row
    for row in _tables("Round trip: dispatch and combine")[0][2:]
    if row[2] == "float32"
  ]
  svg = Svg(640, 60 + 44 * len(rows), "Round trips of host and of the best XLA")
  svg.rect(20, 14, 14, 14, _BLUE)
  svg.text(40, 26, "host")
  svg.rect(100, 14, 14, 14, _ORANGE)
  svg.text(120, 26, "the best program of pure XLA; ms, float32")
  most = max(_number(row[4]) for row in rows)
  for i, (world, shape, _, host, best, *_) in enumerate(rows):
    y = 46 + 44 * i
    svg.text(20, y + 12, shape)
    svg.text(20, y + 28, world, fill=_GRAY)
    for j, (time, color) in enumerate([(host, _BLUE), (best, _ORANGE)]):
      width = 400 * _number(time) / most
      svg.rect(170, y + 17 * j, width, 15, color)
      label = f"{_number(time):g}"
      svg.text(176 + width, y + 12 + 17 * j, label, font_size=12)
  return svg


def cost_per_token() -> Svg:
  """Draws what a token of a round trip costs as their number grows."""
  bench, loop = _tables("How cost grows")[:2]
  lines = {
    "in ep_bench": [
      (float(row[0].split("x")[0]), _number(row[3]))
      for row in bench[2:]
      if row[0].endswith("x512x2x16")
    ],
    "in a loop": [
      (_number(tokens), _number(cost))
      for tokens, cost in zip(loop[0][1:], loop[2][1:], strict=True)
    ],
  }
  svg = Svg(560, 300, "Time per token of a round trip, by tokens of a rank")

  def place(tokens, cost):
    return 70 + 56 * math.log2(tokens / 256), 250 - cost / 7

  for cost in range(0, 1501, 500):
    _, y = place(256, cost)
    svg.line(60, y, 530, y, _PALE)
    svg.text(54, y + 4, str(cost), "end", _GRAY)
  for tokens, _ in lines["in a loop"]:
    x, y = place(tokens, 0)
    svg.text(x, y + 18, f"{tokens:g}", "middle", _GRAY)
  svg.text(295, 288, "tokens of a rank", "middle")
  svg.text(14, 22, "ns per token; host, one process with 4 devices, float32")
  for i, (name, points) in enumerate(lines.items()):
    places = [place(*point) for point in points]
    svg.polyline(places, _COLORS[i])
    for x, y in places:
      svg.rect(x - 3, y - 3, 6, 6, _COLORS[i])
    svg.text(400, 190 + 18 * i, name, fill=_COLORS[i], font_weight="bold")
  return svg


def _number(cell: str) -> float:
  return float(re.match(r"[\d.,]+", cell)[0].rstrip(",").replace(",", ""))


PICTURES = {
  "cost_per_token.svg": cost_per_token,
  "expert_load.svg": expert_load,
  "layout.svg": layout,
  "round_trips.svg": round_trips,
}


def main() -> None:
  root = pathlib.Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", _ROOT))
  for name, draw in PICTURES.items():
    (root / "docs/images" / name).write_text(str(draw()))


if __name__ == "__main__":
  main()
