# SPDX-License-Identifier: Apache-2.0
"""The benchmark runs in both worlds, and rejects wrong results."""

import dataclasses
import gc
import json

import jax
from jax import lax
from jax.sharding import AxisType
import numpy as np
import pytest

from benchmarks import compile_time, contenders, ep_bench, measure, report
from benchmarks import workload as workload_lib
from benchmarks.ops import compile_op, OPS, with_handle
from benchmarks.oracle import WrongResult
from benchmarks.padded import PaddedGather
import ep
import programs

SHAPE = workload_lib.Shape(tokens=6, hidden=5, top_k=2, num_experts=8)


def test_results_of_both_worlds_are_recorded(tmp_path, monkeypatch, capfd):
  results = tmp_path / "results.json"
  names = ["host", "nccl", contenders.HAND_WRITTEN, "memcpy"]
  flags = [
    f"--shapes={SHAPE}",
    "--routings=skewed",
    "--ops=prepare,round_trip",
    f"--contenders={','.join(names)}",
    "--rounds=3",
    "--worlds=1x4,2x2",  # "4x1", the other default, starts twice as many ranks
    f"--json={results}",
    "--gate=1e9",  # CI runs the gate with a bound that holds
  ]
  output = programs.refusal(ep_bench.main, flags, monkeypatch, capfd)
  assert "FAILED: 1x4 " in output, output
  run = json.loads(results.read_text())
  skipped = {(s["world"], s["contender"]): s["why"] for s in run["skipped"]}
  records = {(r["world"], r["op"], r["contender"]): r for r in run["results"]}
  for world in ("1x4", "2x2"):
    for name in names:
      if (world, name) in skipped:
        assert f"skipped {name}: {skipped[world, name]}" in output
        continue
      record = records.pop((world, "round_trip", name))
      payload = 4 * SHAPE.tokens * SHAPE.top_k * SHAPE.hidden * 4
      assert record["payload_bytes"] == payload
      assert record["tokens"] == 4 * SHAPE.tokens
      assert record["capacity"] == 4 * SHAPE.tokens * SHAPE.top_k
      assert (record["shape"], record["dtype"]) == (str(SHAPE), "float32")
      assert (record["routing"], record["tail"]) == ("skewed", "zero")
      assert len(record["seconds"]) == 3
      assert record["q1_s"] <= record["median_s"] <= record["q3_s"]
      assert record["payload_gb_per_s"] == pytest.approx(
        2 * payload / record["median_s"] / 1e9
      )
      assert record["ns_per_token"] > 0
      if name != contenders.MEMCPY:
        assert record["peak_bytes"] is None or record["peak_bytes"] >= 0
        prepare = records.pop((world, "prepare", name))
        assert prepare["payload_gb_per_s"] is None
    assert {name for _, name in skipped} == {"nccl"}
    assert f"round_trip  {SHAPE}  float32  skewed  world {world}" in output
  assert not records
  assert [(row["world"], row["op"]) for row in run["summary"]] == [
    (world, op) for world in ("1x4", "2x2") for op in ("prepare", "round_trip")
  ]
  for row in run["summary"]:
    assert row["times_best_pure_xla"] > 0


# --- In this process ----------------------------------------------------------


@pytest.fixture
def mesh():
  """Makes the mesh of this process, and has XLA compile in half the time.

  The meter of memory collects garbage before each op. What is alive before the
  test is left out of that.
  """
  jax.config.update("jax_disable_most_optimizations", True)
  gc.freeze()
  yield jax.make_mesh(
    (jax.device_count(),), (workload_lib.AXIS,), axis_types=(AxisType.Auto,)
  )
  gc.unfreeze()
  jax.config.update("jax_disable_most_optimizations", False)


def _workload(
  mesh, choices=None, *, shape=SHAPE, dtype="float32", factor=None, tail=True
):
  if choices is None:
    choices = workload_lib.draw("skewed", shape, mesh.size)
  layout = workload_lib.make_layout(
    shape, choices, mesh.size, capacity_factor=factor, zero_tail=tail
  )
  return workload_lib.Workload(layout, choices, np.dtype(dtype))


def _measure(mesh, workload, names, ops=tuple(OPS)):
  return measure.measure(
    mesh, workload, names=names, ops=ops, rounds=1, warmup=0
  )


@pytest.mark.parametrize(
  "dtype, roomy, ops",
  [
    ("float32", True, ["prepare", "dispatch", "combine", "combine_bwd"]),
    ("bfloat16", False, ["dispatch_bwd", "round_trip"]),
  ],
)
def test_every_contender_is_right(mesh, dtype, roomy, ops):
  factor = None if roomy else 1.5
  choices = workload_lib.draw("with_unused_choices", SHAPE, mesh.size)
  workload = _workload(mesh, choices, dtype=dtype, factor=factor, tail=roomy)
  names = ["host", *contenders.PURE_XLA]
  records = _measure(mesh, workload, names, ops)
  assert [r["contender"] for r in records] == names * len(ops)


@pytest.mark.parametrize("op, leaf", [("dispatch", 0), ("dispatch_bwd", 1)])
def test_one_wrong_number_is_an_error(mesh, monkeypatch, op, leaf):
  right = getattr(PaddedGather, op)

  def spoil(*args):
    leaves, tree = jax.tree.flatten(right(*args))
    x = leaves[leaf]
    # The last row belongs to the tail if the rank is not full.
    leaves[leaf] = x.at[(-1,) * x.ndim].add(lax.axis_index("ep") == 0)
    return tree.unflatten(leaves)

  monkeypatch.setattr(PaddedGather, op, spoil)
  with pytest.raises(WrongResult, match=f"padded_gather: {op} on rank 0: 1 of"):
    _measure(mesh, _workload(mesh), ["padded_gather"], [op])


def test_round_trips_materialize_the_rows_that_experts_would_read():
  mesh = jax.make_mesh(
    (jax.device_count(),), (workload_lib.AXIS,), axis_types=(AxisType.Auto,)
  )
  # In this shape, received rows are most of the memory of a round trip.
  shape = workload_lib.Shape(tokens=6, hidden=512, top_k=8, num_experts=32)
  workload = _workload(mesh, shape=shape)
  inputs = workload.inputs(mesh, ["topk_idx", "tokens", "topk_weights"])
  contender = contenders.PURE_XLA["gathered"](workload.layout)
  inputs = with_handle(contender, mesh, inputs, ["round_trip"])
  program, args = compile_op("round_trip", contender, mesh, inputs)
  rows_bytes = workload.layout.capacity * shape.hidden * 4
  memory = program.lower(*args).compile().memory_analysis()
  assert memory.temp_size_in_bytes >= rows_bytes


# --- Layers ------------------------------------------------------------------


@pytest.mark.parametrize(
  "dtype, op", [("float32", "moe_grad"), ("bfloat16", "moe")]
)
def test_every_layer_is_right(mesh, dtype, op):
  """Contenders that have other ops alone take no part."""
  shape = dataclasses.replace(SHAPE, inner=3)
  choices = workload_lib.draw("with_unused_choices", shape, mesh.size)
  workload = _workload(mesh, choices, shape=shape, dtype=dtype, tail=False)
  names = ["host", *contenders.LAYERS]
  records = _measure(
    mesh, workload, ["padded_gather", *names, contenders.MEMCPY], [op]
  )
  *layers, memcpy = records
  assert [r["contender"] for r in layers] == names
  assert all(r["planned_bytes"] > 0 for r in layers)
  assert memcpy["contender"] == contenders.MEMCPY


def test_models_have_the_shapes_of_their_presets():
  shapes = workload_lib.parse_shapes(["models"], tokens=7, scale=16)
  assert len(shapes) == len(ep.presets.BY_NAME)
  (shape,) = workload_lib.parse_shapes(["mixtral_8x7b"], tokens=7, scale=16)
  assert shape == workload_lib.Shape(7, 256, 2, 8, 896)
  assert workload_lib.parse_shapes([str(shape)], tokens=1, scale=1) == [shape]
  with pytest.raises(ValueError, match="7 does not divide hidden = 4096"):
    workload_lib.parse_shapes(["mixtral_8x7b"], tokens=7, scale=7)
  with pytest.raises(ValueError, match="'mixtral' is no shape; choose among"):
    workload_lib.parse_shapes(["mixtral"], tokens=7, scale=7)


def test_compiled_models_differ_in_their_ffns_alone(mesh):
  with compile_time.bootstrap(mesh, "host") as group:
    moe = compile_time.lower(mesh, group, 2).as_text()
  dense = compile_time.lower(mesh, None, 2).as_text()
  assert "ep_dispatch" in moe and "ep_dispatch" not in dense
  scan = "stablehlo.while"
  assert scan in moe and scan in dense


# --- Reports and flags --------------------------------------------------------


def _records(**seconds):
  case = dict(world="w", shape="s", dtype="d", routing="r", op="round_trip")
  memory = dict(peak_bytes=None, planned_bytes=None)
  common = dict(case, payload_bytes=10**9, tokens=10, **memory)
  return [
    report.add_statistics({**common, "contender": name, "seconds": s})
    for name, s in seconds.items()
  ]


def test_ratios_are_of_rounds_and_of_the_best_contender(capsys):
  records = _records(
    host=[1.0, 10.0, 2.0],
    padded_scatter=[4.0, 40.0, 8.0],
    gathered=[2.0, 20.0, 4.0],
    memcpy=[0.5, 5.0, 1.0],
  )
  assert records[0]["median_s"] == 2.0
  assert records[0]["payload_gb_per_s"] == 1.0  # in both directions
  (row,) = report.summary(records)
  assert row["times_best_pure_xla"] == pytest.approx(2.0)
  assert row["share_of_memcpy"] == pytest.approx(0.5)
  assert report.gate(records, 3.9)
  assert not report.gate(records, 4.1)
  assert not report.gate(_records(host=[1.0]), 0.0)  # nothing to compare with
  assert not report.gate([], 0.0)
  report.print_tables(records)
  report.print_summary([row])
  assert "gathered" in capsys.readouterr().out


@pytest.mark.parametrize(
  "flags, message",
  [
    (["--shapes=1x2x3"], "'1x2x3' is no shape; choose among goals"),
    (["--shapes=8x8x2x6"], "E must be a multiple of the 4 ranks"),
    (["--worlds=four"], "'four' is none"),
    (["--routings=best"], "choose among uniform"),
    (["--shapes=8x8x2x8", "--capacity_factor=0.5"], "raise --capacity_factor"),
    (["--ops=sort"], "choose among prepare"),
    (["--contenders=me"], "choose among host"),
    (["--ops=moe", "--shapes=8x8x2x8"], "need F, the inner size"),
    (["stray"], "unexpected arguments"),
  ],
)
def test_bad_flags_are_explained_once(monkeypatch, capfd, flags, message):
  output = programs.refusal(ep_bench.main, flags, monkeypatch, capfd)
  assert output.count(message) == 1, output
