# SPDX-License-Identifier: Apache-2.0
"""ep_bench calls NCCL EP correctly, over a fake of NCCL EP."""

import contextlib

import jax
from jax.sharding import NamedSharding
import numpy as np
import pytest

from benchmarks import contenders, measure, nccl_ep
from benchmarks import workload as workload_lib
from benchmarks.ops import OPS
from benchmarks.oracle import WrongResult
from conftest import make_mesh
from ep._src.native import ffi
from nccl_testing import load_fake_nccl, rank_threads

SHAPE = workload_lib.Shape(tokens=6, hidden=16, top_k=3, num_experts=8)


@pytest.fixture(scope="module", autouse=True)
def fake():
  load_fake_nccl()


@contextlib.contextmanager
def connect(mesh, workload, inputs):
  """Does the work of `nccl_ep.connect`, with all ranks in this process."""
  unique_id = ffi.new_nccl_id("", "")
  with rank_threads(mesh.size) as on_ranks:
    ranks = on_ranks(
      lambda rank: nccl_ep.Rank(
        workload,
        rank,
        device=mesh.devices.flat[rank],
        ordinal=rank,
        unique_id=unique_id,
        libraries=("", ""),
      )
    )

    def make(op):
      made = [
        rank.make(op, {name: part(x, i) for name, x in inputs.items()})
        for i, rank in enumerate(ranks)
      ]
      wholes = [
        jax.make_array_from_single_device_arrays(
          (len(parts) * parts[0].shape[0], *parts[0].shape[1:]),
          NamedSharding(mesh, workload_lib.SPEC),
          parts,
        )
        for parts in zip(*(outputs for _, outputs in made), strict=True)
      ]

      def run():
        on_ranks(lambda rank: made[rank][0]())
        return wholes

      return run

    def part(x, rank):
      (data,) = (
        shard.data
        for shard in x.addressable_shards
        if shard.device == mesh.devices.flat[rank]
      )
      return data

    try:
      yield make
    finally:
      on_ranks(lambda rank: ranks[rank].close())


def run_case(monkeypatch, *, shape=SHAPE, dtype="float32", factor=None):
  monkeypatch.setattr(nccl_ep, "connect", connect)
  mesh = make_mesh({workload_lib.AXIS: 4})
  choices = workload_lib.draw("with_unused_choices", shape, mesh.size)
  layout = workload_lib.make_layout(
    shape, choices, mesh.size, capacity_factor=factor, zero_tail=True
  )
  return measure.measure(
    mesh,
    workload_lib.Workload(layout, choices, np.dtype(dtype)),
    names=[contenders.NCCL_EP, contenders.MEMCPY],
    ops=list(OPS),
    rounds=2,
    warmup=1,
  )


@pytest.mark.parametrize(
  "dtype, factor", [("float32", None), ("bfloat16", 2.0), ("float16", 2.0)]
)
def test_results_are_right(monkeypatch, dtype, factor):
  records = run_case(monkeypatch, dtype=dtype, factor=factor)
  ops = [r["op"] for r in records if r["contender"] == contenders.NCCL_EP]
  assert ops == [op for op in OPS if op in nccl_ep.CALLS]
  assert all(len(r["seconds"]) == 2 for r in records)


def test_an_output_that_was_not_written_is_wrong(monkeypatch):
  call = nccl_ep.Rank._call

  def skip(self, function, *args):
    if function != "dispatch":
      call(self, function, *args)

  monkeypatch.setattr(nccl_ep.Rank, "_call", skip)
  with pytest.raises(WrongResult, match="nccl_ep: dispatch on rank 0"):
    run_case(monkeypatch)


def test_rows_that_nccl_ep_does_not_support_are_refused(monkeypatch):
  shape = workload_lib.Shape(tokens=6, hidden=5, top_k=2, num_experts=8)
  with pytest.raises(ValueError, match="hidden"):
    run_case(monkeypatch, shape=shape)
