# SPDX-License-Identifier: Apache-2.0
"""Tests the rates of named TPU slices."""

import collections
import itertools
import math

import numpy as np
import pytest

import ep
from ep._tools.planning.cluster import NODES


def even_gb_s(sides, link_gb_s, is_torus):
  """Returns a chip's GB/s if each chip sends equal bytes to every chip.

  Bytes follow one dimension after another, by the shortest path.
  """
  load = collections.Counter()  # Pairs of chips whose rows use a link.
  for source, to in itertools.product(np.ndindex(*sides), repeat=2):
    at = list(source)
    for axis, side in enumerate(sides):
      steps = to[axis] - at[axis]
      ways = {steps}
      if is_torus:
        ways = {steps % side, steps % side - side}
        ways = {way for way in ways if abs(way) == min(map(abs, ways))}
      for way in ways:
        for step in range(abs(way)):
          place = list(at)
          place[axis] = (at[axis] + int(np.sign(way)) * step) % side
          load[(*place, axis, way > 0)] += 1 / len(ways)
      at[axis] = to[axis]
  return link_gb_s * math.prod(sides) / max(load.values())


@pytest.mark.parametrize(
  "name, link_gb_s, sides, is_torus",
  [
    ("v5e", 50, (2, 2), False),
    ("v6e", 100, (2, 4), False),
    ("v6e", 100, (8, 8), False),
    ("v6e", 100, (16, 16), True),
    ("v5p", 100, (2, 2, 1), False),
    ("v5p", 100, (2, 4, 4), False),
    ("v5p", 100, (4, 4, 4), True),
    ("v5p", 100, (4, 4, 8), True),
  ],
)
def test_the_rate_in_a_slice_is_that_of_its_busiest_link(
  name, link_gb_s, sides, is_torus
):
  found = ep.Cluster.named(name, 1, math.prod(sides))
  assert found.nvlink_gb_s == even_gb_s(sides, link_gb_s, is_torus)


def test_a_machine_is_a_slice_by_default():
  for name, cluster in NODES.items():
    assert ep.Cluster.named(name, 1, cluster.gpus_per_node) == cluster
  # A chip of tpu7x has the links of a chip of v5p, and two devices.
  tpu7x, v5p = (
    ep.Cluster.named(name, 3, devices)
    for name, devices in (("tpu7x", 16), ("v5p", 8))
  )
  assert 2 * tpu7x.nvlink_gb_s == v5p.nvlink_gb_s
  assert tpu7x.num_ranks == 2 * v5p.num_ranks == 48
