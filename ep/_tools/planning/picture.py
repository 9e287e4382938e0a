# SPDX-License-Identifier: Apache-2.0
"""Draws stacked bars as an SVG, without a plotting library."""

from __future__ import annotations

from collections.abc import Mapping

# The colors of Okabe and Ito, distinct for people with any color vision.
_COLORS = "#0072b2", "#e69f00", "#009e73", "#cc79a7"
_LABELS, _LONGEST, _HEIGHT, _TOP = 330, 440, 30, 40  # pixels


def bars(seconds: Mapping[str, Mapping[str, float]]) -> str:
  """Draws a bar for each label, stacked from the times of at most four ops."""
  ops = list(dict.fromkeys(op for times in seconds.values() for op in times))
  colors = dict(zip(ops, _COLORS, strict=False))
  longest = max(sum(times.values()) for times in seconds.values()) or 1.0
  width, height = _LABELS + _LONGEST + 90, _TOP + _HEIGHT * len(seconds) + 10
  drawn = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
    ' font-family="sans-serif" font-size="13">',
    "<title>Time of a layer's exchanges in a step</title>",
    f'<rect width="{width}" height="{height}" fill="#fff"/>',
  ]

  def rect(x: float, y: int, w: float, h: int, fill: str) -> None:
    drawn.append(
      f'<rect x="{x:.1f}" y="{y}" width="{w:.1f}" height="{h}" fill="{fill}"/>'
    )

  def text(x: float, y: int, content: str, anchor: str = "start") -> None:
    drawn.append(
      f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{content}</text>'
    )

  for n, (op, color) in enumerate(colors.items()):
    rect(10 + 150 * n, 10, 14, 14, color)
    text(30 + 150 * n, 22, op)
  for n, (label, times) in enumerate(seconds.items()):
    x, y = float(_LABELS), _TOP + _HEIGHT * n
    text(x - 8, y + 16, label, "end")
    for op, duration in times.items():
      length = _LONGEST * duration / longest
      rect(x, y, length, _HEIGHT - 8, colors[op])
      x += length
    text(x + 6, y + 16, f"{sum(times.values()) * 1e3:.2f} ms")
  return "\n".join([*drawn, "</svg>", ""])
