# SPDX-License-Identifier: Apache-2.0
"""Predicts what a layer's exchanges cost on a cluster: python -m ep plan."""

from __future__ import annotations

import argparse
from collections.abc import Callable
import dataclasses
from typing import Any

from ep import presets
from ep._tools.planning import links
from ep._tools.planning.cluster import Cluster, NODES
from ep._tools.planning.place import NAMED
from ep._tools.planning.plan import plan


def main(arguments: list[str]) -> None:
  """Prints a plan, or exits with code 2 and an error."""
  parser = _parser()
  options = vars(parser.parse_args(arguments))
  preset, name = presets.BY_NAME[options.pop("preset")], options.pop("layer")
  cfg = dataclasses.replace(preset, name=name)
  picture = options.pop("picture")
  sizes = (options.pop(name) for name in ("cluster", "nodes", "gpus"))
  try:
    found = plan(cfg, Cluster.named(*sizes), **options)
    if picture:
      found.picture(picture)
  except (OSError, ValueError) as e:
    parser.exit(2, f"{e}\n")
  print(found)


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m ep plan",
    description="Predicts what a layer's exchanges cost on a cluster.",
  )
  add = parser.add_argument
  add("--preset", choices=presets.BY_NAME, required=True, help="the layer")
  add("--nodes", type=int, required=True, help="number of nodes")
  add("--cluster", choices=NODES, default="dgx_h100", help="kind of nodes")
  add("--gpus", type=int, help="GPUs used in each node; default: all")
  add(
    "--routing",
    default="uniform",
    help='"uniform", "zipf:0.5", or the folder of a record',
  )
  add("--layer", default="moe", help="name of the layer in the record")
  add(
    "--tokens",
    dest="tokens_per_rank",
    type=int,
    default=4096,
    help="tokens of a rank; a record overrides it",
  )
  for name, dest, item, default in (
    ("--ep", "ep_sizes", int, None),
    ("--placements", "placements", str, ["linear"]),
    ("--replicas", "replicas", int, [0]),
    ("--capacity_factors", "capacity_factors", _factor, None),
  ):
    add(
      name,
      dest=dest,
      type=_several(item),
      default=default,
      help="one or more, separated by commas"
      + (f": {', '.join(NAMED)}" if item is str else ""),
    )
  add("--transport", choices=links.TRANSPORTS, default="hierarchical")
  add("--picture", help="path of an SVG to write")
  return parser


def _several(item: Callable[[str], Any]) -> Callable[[str], list[Any]]:
  def several(text: str) -> list[Any]:
    try:
      return [item(word) for word in text.split(",")]
    except ValueError:
      raise argparse.ArgumentTypeError(
        f"{text!r}, but numbers with commas are expected"
      ) from None

  return several


def _factor(text: str) -> float | None:
  return None if text.lower() == "none" else float(text)
