# SPDX-License-Identifier: Apache-2.0
"""A group reports the host memory that it keeps, which does not grow."""

import jax
import pytest

from cases import large_case
from conftest import make_mesh
from groups import bootstrap, not_with_xla
from op_functions import everything


def staged_bytes(case):
  """Returns the most bytes that an exchange stages; see EpGroup.memory."""
  rows, weights = case.rows(), case.row_weights()
  tokens, topk_weights = case.tokens(), case.weights()
  ranks = len(rows)
  slots = (rows.nbytes + weights.nbytes) // ranks
  return max(slots, (tokens.nbytes + topk_weights.nbytes) // ranks) + 64


def test_no_memory_before_the_first_exchange():
  with bootstrap(make_mesh({"ep": 4})) as group:
    assert group.memory() == (0, 0)


@pytest.mark.skipif(jax.process_count() > 1, reason="needs one process")
def test_ranks_of_a_process_need_no_segments():
  case = large_case("skewed")
  case.run(everything, *case.inputs())
  assert case.layer.group.memory() == (0, 0)


@not_with_xla("XLA owns all buffers")
@pytest.mark.skipif(jax.process_count() == 1, reason="needs several processes")
def test_segments_are_used_again():
  case = large_case("skewed")
  bytes = staged_bytes(case)
  for _ in range(20):
    jax.block_until_ready(case.run(everything, *case.inputs()))
    memory = case.layer.group.memory()
    # The five ops of `everything`, and a second combine, may run at once.
    assert bytes <= memory.reserved < 4 * 6 * bytes
    assert 0 < memory.resident <= memory.reserved


def test_memory_after_finalize_is_an_error():
  with bootstrap(make_mesh({"ep": 4})) as group:
    pass
  with pytest.raises(RuntimeError, match="EpGroup.memory.*finalized"):
    group.memory()
