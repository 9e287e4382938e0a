# SPDX-License-Identifier: Apache-2.0
"""ep_prepare counts the rows of each expert and declares its shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import assert_same, Case
import ep
from groups import E, layer, MESHES, ranks
from ops import sizes
from routings import ROUTINGS


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_counts(mesh, alignment, routing):
  Case(layer(mesh, alignment=alignment), routing).check(sizes)


def test_counts_add_up():
  """The counts are those of np.bincount; no oracle is involved."""
  case = Case(layer(), "with_unused_choices")
  padded, counts, total = case.run(sizes)
  everywhere = np.bincount(case.topk_idx[case.topk_idx >= 0], minlength=E)
  for shard in counts.addressable_shards:
    rank = shard.index[0].start
    own = everywhere.reshape(counts.shape)[rank]
    np.testing.assert_array_equal(np.asarray(shard.data)[0], own)
  for shard in total.addressable_shards:
    own = everywhere.reshape(counts.shape)[shard.index[0].start]
    assert np.asarray(shard.data).item() == own.sum()


@pytest.mark.parametrize("mesh", MESHES)
def test_shapes_are_known_without_running(mesh):
  config = layer(mesh)
  case = Case(config)
  handle = jax.eval_shape(
    lambda idx: ep.ep_prepare(config, idx), case.put(case.topk_idx)
  )
  r, l = ranks(config), config.num_local_experts
  assert handle.mem.dtype == jnp.uint8
  assert handle.mem.shape[0] == r
  for leaf, width in [
    (handle.group_sizes, l),
    (handle.token_counts, l),
    (handle.total_recv_tokens, 1),
  ]:
    assert (leaf.shape, leaf.dtype) == ((r, width), jnp.int32)


def test_int64_ids_are_those_of_int32():
  case = Case(layer(), "with_unused_choices")
  with jax.enable_x64(True):
    wide = Case(case.layer, case.topk_idx.astype(np.int64))
    assert wide.put(wide.topk_idx).dtype == jnp.int64
    actual = wide.run(sizes)
  assert_same(actual, case.oracle.sizes())
