# SPDX-License-Identifier: Apache-2.0
"""Rows beyond a rank's capacity are an error on all ranks, or are dropped."""

import numpy as np
import pytest

from cases import Case
from groups import layer
from op_functions import everything, round_trip, sizes


def full_layer(overflow, capacity, **options):
  return layer(overflow=overflow, recv_capacity_per_rank=capacity, **options)


def needed_rows(case):
  """Returns the most rows that any rank would receive."""
  return int(case.oracle.sizes().total_recv_tokens.max())


def test_an_error_on_every_rank_after_which_the_group_works():
  """If only one rank overflows, all ranks report needed and given rows."""
  case = Case(full_layer("error", 8, name="narrow"), "to_one_expert")
  assert needed_rows(case) == 20
  words = ["ep_prepare", '"narrow"', "20", "8", "drop"]
  case.check_error(words, round_trip, case.tokens(), case.weights())
  fits = Case(case.layer, np.full_like(case.topk_idx, -1))
  fits.check(round_trip, fits.tokens(), fits.weights())


def test_the_cure_has_the_argument_that_was_passed():
  """The error of a layer with a capacity_factor names it."""
  config = layer(overflow="error", capacity_factor=1.0)
  case = Case(config, "to_one_expert")
  rows = case.layer.capacity
  case.check_error([f"capacity is {rows}; raise capacity_factor or"], sizes)


@pytest.mark.parametrize("overflow, alignment", [("error", 4), ("drop", 1)])
def test_a_capacity_that_just_suffices(overflow, alignment):
  wanted = needed_rows(Case(layer(alignment=alignment), "skewed"))
  config = full_layer(overflow, wanted, alignment=alignment)
  case = Case(config, "skewed", whole=True)
  case.check(everything, *case.inputs())


def test_one_row_too_few():
  wanted = needed_rows(Case(layer(), "skewed"))
  case = Case(full_layer("error", wanted - 1), "skewed")
  case.check_error([str(wanted), str(wanted - 1)], sizes)


@pytest.mark.parametrize(
  "mesh, alignment, capacity",
  [("dp2_ep2", 1, 11), ("ep4", 4, 8)],
)
@pytest.mark.parametrize("routing", ["skewed", "to_one_expert", "idle"])
def test_drop(mesh, routing, alignment, capacity):
  config = full_layer("drop", capacity, mesh=mesh, alignment=alignment)
  case = Case(config, routing, whole=True)
  case.check(everything, *case.inputs())
