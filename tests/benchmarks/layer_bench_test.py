# SPDX-License-Identifier: Apache-2.0
"""The benchmark of whole layers knows its shapes and rejects wrong results."""

from absl import flags
from absl.testing import flagsaver
import jax
from jax.sharding import AxisType
import numpy as np
import pytest

from benchmarks import contenders, ep_bench, measure, routings, scanned_model
from benchmarks import workload as workload_lib
from benchmarks.ops import LAYERS
from benchmarks.oracle import Oracle, WrongResult
import ep

SHAPE = workload_lib.Shape(tokens=6, hidden=5, top_k=2, num_experts=8, inner=3)
NAMES = ["host", *contenders.LAYERS]


@pytest.fixture
def mesh():
  """Makes the mesh of this process, and has XLA compile in half the time."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield jax.make_mesh(
    (jax.device_count(),), (workload_lib.AXIS,), axis_types=(AxisType.Auto,)
  )
  jax.config.update("jax_disable_most_optimizations", False)


def _workload(mesh, dtype="float32"):
  rng = np.random.default_rng(0)
  sizes = mesh.size * SHAPE.tokens, SHAPE.top_k, SHAPE.num_experts
  choices = routings.draw("zipf", *sizes, zipf=1.0)
  choices[rng.random(choices.shape) < 0.3] = -1
  layout = workload_lib.make_layout(
    SHAPE, choices, mesh.size, capacity_factor=None, zero_tail=False
  )
  return workload_lib.Workload(layout, choices, np.dtype(dtype))


def _measure(mesh, names, ops, dtype="float32"):
  workload = _workload(mesh, dtype)
  return measure.measure(
    mesh, workload, names=names, ops=ops, rounds=1, warmup=0
  )


@pytest.mark.parametrize(
  "dtype, ops", [("float32", tuple(LAYERS)), ("bfloat16", ("moe_grad",))]
)
def test_every_layer_is_right(mesh, dtype, ops):
  records = _measure(mesh, NAMES, ops, dtype)
  assert [r["contender"] for r in records] == NAMES * len(ops)
  assert all(r["planned_bytes"] > 0 for r in records)


def test_contenders_run_the_ops_that_they_have(mesh):
  records = _measure(mesh, ["padded_gather", "masked", "memcpy"], ["moe"])
  assert [r["contender"] for r in records] == ["masked", "memcpy"]


def test_one_wrong_number_is_an_error(mesh):
  workload = _workload(mesh)
  contender = contenders.LAYERS["masked"](workload.layout)
  inputs = workload.inputs(mesh, LAYERS["moe_grad"].inputs)
  program, args = measure.compile_op("moe_grad", contender, mesh, inputs)
  grads = program(*args)
  oracle = Oracle(workload)
  oracle.check("moe_grad", grads, exact=False)
  for at, right in enumerate(grads):
    wrong = np.array(right)
    wrong[(-1,) * wrong.ndim] += 1e-3
    spoiled = list(grads)
    spoiled[at] = jax.device_put(wrong, right.sharding)
    message = f"moe_grad on rank {mesh.size - 1}: 1 of"
    with pytest.raises(WrongResult, match=message):
      oracle.check("moe_grad", spoiled, exact=False)


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


def test_layers_need_an_inner_size():
  flags.FLAGS.mark_as_parsed()
  with flagsaver.as_parsed(ops="moe", shapes="8x8x2x8"):
    with pytest.raises(ValueError, match="need F, the inner size"):
      ep_bench.all_cases(4)


def test_compiled_models_differ_in_their_ffns_alone(mesh):
  with scanned_model.bootstrap(mesh, "host") as group:
    moe = scanned_model.lower(mesh, scanned_model.MoE(group), 2).as_text()
  dense = scanned_model.lower(mesh, scanned_model.Dense(), 2).as_text()
  assert "ep_dispatch" in moe and "ep_dispatch" not in dense
  scan = "stablehlo.while"
  assert scan in moe and scan in dense
