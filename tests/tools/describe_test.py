# SPDX-License-Identifier: Apache-2.0
"""ep.describe returns the oracle's numbers for the ranks of this process."""

import functools

import jax
import numpy as np
import pytest

from cases import Case
import ep
from groups import E, layer, ranks, spec
from op_functions import handle_of


def check_summary(summary, case, which):
  """Checks the summary against the oracle's numbers for the ranks `which`."""
  sizes = case.oracle.sizes()
  ends = sizes.group_sizes.cumsum(1)
  for name, array in [
    ("group_sizes", sizes.group_sizes),
    ("token_counts", sizes.token_counts),
    ("total_recv_tokens", sizes.total_recv_tokens[:, 0]),
    ("dropped_counts", sizes.dropped_counts),
    ("dropped", sizes.dropped_counts.sum(1)),
    ("slab_offsets", ends - sizes.group_sizes),
  ]:
    actual, want = getattr(summary, name), np.asarray(array)[which]
    np.testing.assert_array_equal(actual, want)
    assert type(actual) is np.ndarray and actual.dtype == np.int32


@pytest.mark.parametrize(
  "mesh, routing",
  [("ep4", "skewed"), ("dp2_ep2", "with_unused_choices"), ("dp4_ep1", "idle")],
)
def test_global_view(mesh, routing):
  config = layer(mesh, alignment=4, recv_capacity_per_rank=32, overflow="drop")
  case = Case(config, routing)
  summary = ep.describe(case.run(handle_of))
  shards = case.put(np.arange(ranks(config))).addressable_shards
  here = sorted(s.index[0].start for s in shards)
  np.testing.assert_array_equal(summary.ranks, here)
  check_summary(summary, case, here)
  experts = np.arange(ranks(config) * config.group.num_local_experts) % E
  experts = experts.reshape(ranks(config), -1)
  np.testing.assert_array_equal(summary.experts, experts[here])


def test_local_view():
  """A callback inside the program describes one rank at a time."""
  case, seen = Case(layer(alignment=4), "skewed"), []

  @jax.jit
  @functools.partial(
    jax.shard_map,
    mesh=case.layer.group.mesh,
    in_specs=spec(case.layer),
    out_specs=spec(case.layer),
  )
  def program(topk_idx):
    handle = ep.ep_prepare(case.layer, topk_idx)
    rank = jax.lax.axis_index("ep")
    jax.debug.callback(
      lambda rank, h: seen.append((int(rank), ep.describe(h))), rank, handle
    )
    return handle.group_sizes

  jax.block_until_ready(program(case.put(case.topk_idx)))
  jax.effects_barrier()
  assert len(seen) == jax.local_device_count()
  for rank, summary in seen:
    assert summary.ranks is None
    check_summary(summary, case, [rank])


def test_table():
  config = layer(
    name="moe_3", recv_capacity_per_rank=8, overflow="drop", alignment=4
  )
  summary = ep.describe(Case(config, "to_one_expert").run(handle_of))
  head, *lines = str(summary).splitlines()
  assert 'layer "moe_3": 8 experts' in head and "capacity 8" in head
  if 3 in summary.ranks:
    assert lines[-3].split() == ["3", "all", "0", "20", "8", "12"]
    assert lines[-2].split() == ["6", "0", "8", "8", "12"]
  assert max(map(len, lines)) <= 80


def test_refuses_handles_without_numbers():
  case = Case(layer(name="moe_3"))
  with pytest.raises(TypeError, match='"moe_3".*traced.*debug.callback'):
    case.run(lambda ops: ep.describe(ops.handle).token_counts)
  stacked = jax.tree.map(lambda x: x[None], case.run(handle_of))
  with pytest.raises(ValueError, match="stacked.*take one"):
    ep.describe(stacked)
