# SPDX-License-Identifier: Apache-2.0
"""Puts a pytest process into a process layout; every test imports this module.

A layout is named processes x devices per process. A test file runs in any:

    python -m pytest tests/foo_test.py                                    # 1x4
    python -m ep launch --num_processes=4 -m pytest tests/foo_test.py     # 4x1
    ./bazelw test //tests:foo_test_1x4_cpu //tests:foo_test_2x2_cpu

Every process runs every test, so a test is an SPMD program: all processes
build the same NumPy arrays from a fixed seed, and all take the branches that
lead to a collective. Expected values are whole arrays. Each process compares
its shards with them without a collective, so a failure on one rank cannot make
another rank hang in the check. Elsewhere a failure may make other ranks wait:
pass `TIMEOUT_S` to `ep_bootstrap` to limit that wait.

    from conftest import assert_shards_equal, make_mesh, to_global
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import math
import os
import pathlib
from typing import Any

import quick_compiler

# Plain pytest runs one process with four devices (1x4).
if "JAX_COORDINATOR_ADDRESS" not in os.environ:
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=4"
  )

# XLA:CPU compiles in a third of the time if it does not optimize code. Only two
# kinds of 1x4 tests run optimized code: tests of the host backend with
# quick_compiler = False, and xla_backend_test.
if "cuda" not in os.environ.get("JAX_PLATFORMS", "") and (
  os.environ.get("JAX_NUM_PROCESSES", "1") != "1"
  or os.environ.get("EP_TEST_BACKEND") == "xla"
  or os.environ.get("EP_TEST_QUICK_COMPILER") == "1"
):
  os.environ["XLA_FLAGS"] = quick_compiler.FLAGS + os.environ.get(
    "XLA_FLAGS", ""
  )

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import numpy as np
import pytest

from ep import launch

launch.initialize()
# By default GPUs would multiply float32 as TF32.
jax.config.update("jax_default_matmul_precision", "highest")

TIMEOUT_S = 20.0

_SHARDS = int(os.environ.get("TEST_TOTAL_SHARDS", 1))  # of Bazel's test


def pytest_addoption(parser: pytest.Parser) -> None:
  """Adds options for test lengths; defaults depend on the process count."""

  def option(name, one, four, more=0):
    count = jax.process_count()
    default = one if count == 1 else four if count <= 4 else more
    parser.addoption(name, type=int, default=default)

  # Each process computes all expected values, so 4 processes check fewer cases.
  # Three draws have each drop policy, dtype and view of rules_test. For
  # backend="xla", which XLA compiles slowly, CI runs the rules without a draw,
  # and draws each night.
  option("--draws", 0 if os.environ.get("EP_TEST_BACKEND") == "xla" else 3, 2)
  option("--draws_first", 0, 0)
  option("--draws_seed", 8, 8)
  option("--lifetimes", 600, 160)
  option("--load_rounds", 4, 4)
  option("--soak_steps", 2000, 2000, 100)
  option("--fsdp_steps", 2, 2, 2)
  parser.addoption("--first_cases", action="store_true")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(
  config: pytest.Config, items: list[pytest.Item]
) -> None:
  """Implements `--first_cases` and Bazel's shards.

  `--first_cases` selects one case of each test function. A shard has all tests
  with the same parameters, such as a row of layer_table.py, because these tests
  share programs.
  """
  first, shards, kept, others = set(), {}, [], []
  mine = int(os.environ.get("TEST_SHARD_INDEX", 0))
  for item in items:
    function, _, parameters = item.nodeid.partition("[")
    shard = shards.setdefault(parameters or function, len(shards)) % _SHARDS
    is_other = config.option.first_cases and function in first
    (others if is_other or shard != mine else kept).append(item)
    first.add(function)
  config.hook.pytest_deselected(items=others)
  items[:] = kept


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
  """Lets a shard pass that has none of the selected tests."""
  if _SHARDS > 1 and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
    session.exitstatus = pytest.ExitCode.OK


def pytest_configure(config: pytest.Config) -> None:
  """Lets rank 0 write the test.xml that Bazel would otherwise generate.

  Also tells Bazel that the test implements shards.
  """
  if jax.process_index() == 0 and "XML_OUTPUT_FILE" in os.environ:
    config.option.xmlpath = os.environ["XML_OUTPUT_FILE"]
  if "TEST_SHARD_STATUS_FILE" in os.environ:
    pathlib.Path(os.environ["TEST_SHARD_STATUS_FILE"]).touch()


def make_mesh(
  axes: Mapping[str, int], axis_types: Sequence[AxisType] | None = None
) -> Mesh:
  """Returns a mesh of the first devices, as `make_mesh({"dp": 2, "ep": 2})`.

  The axes are Auto by default. Skips the calling test if there are too few
  devices. With several processes, also skips it if the mesh leaves out devices,
  whose processes could not take part. Both conditions depend on the process
  layout only, so all processes skip or none does. 1x4 runs every mesh of up to
  4 devices.
  """
  size = math.prod(axes.values())
  layout = f"{jax.process_count()}x{jax.local_device_count()}"
  if size > jax.device_count():
    pytest.skip(f"{layout} has too few devices for a mesh of {size}")
  if size < jax.device_count() and jax.process_count() > 1:
    pytest.skip(f"a mesh of {size} leaves out processes of {layout}")
  return jax.make_mesh(
    tuple(axes.values()),
    tuple(axes),
    axis_types=axis_types or (AxisType.Auto,) * len(axes),
    devices=jax.devices()[:size],
  )


def to_global(
  array: np.ndarray, mesh: Mesh, spec: PartitionSpec = PartitionSpec()
) -> jax.Array:
  """Makes `array`, equal on all processes, a global array sharded by `spec`."""
  array = np.asarray(array)
  return jax.make_array_from_callback(
    array.shape, NamedSharding(mesh, spec), lambda index: array[index]
  )


@contextlib.contextmanager
def refused(*words: str) -> Iterator[None]:
  """Expects that the block raises an error whose message has all words."""
  with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
    yield
  for word in words:
    assert word in str(error.value)


def assert_shards_equal(
  actual: jax.Array, expected: np.ndarray, *, nan_bits: bool = False
) -> None:
  """Fails unless this process's shards of `actual` have the expected bits.

  Also compares shape and dtype. +0.0 differs from -0.0. Any two NaNs are equal
  unless `nan_bits` is set. The message gives the global index of the first
  difference.
  """
  expected = np.asarray(expected)
  assert actual.shape == expected.shape
  assert actual.dtype == expected.dtype
  for shard in actual.addressable_shards:
    got, want = np.asarray(shard.data), expected[shard.index]
    differs = _bits(got) != _bits(want)
    is_float = np.issubdtype(got.dtype, np.inexact) or got.dtype.kind == "V"
    if is_float and not nan_bits:
      differs &= ~(np.isnan(got) & np.isnan(want))
    if differs.any():
      at = tuple(np.argwhere(differs)[0])
      where = tuple(
        int(i) + (s.start or 0) for i, s in zip(at, shard.index, strict=True)
      )
      pytest.fail(
        f"shard on {shard.device}: {differs.sum()} of {differs.size} elements "
        f"differ; the first is at global index {where}: "
        f"got {got[at]!r}, expected {want[at]!r}, of bits"
        f" {_bits(got)[at]:#x} and {_bits(want)[at]:#x}"
      )


def assert_alike(actual: Any, expected: Any) -> None:
  """Fails unless this process's shards of two trees have the same bits.

  The leaves are global arrays.
  """

  def check(x, y):
    shards = zip(x.addressable_shards, y.addressable_shards, strict=True)
    for a, b in shards:
      np.testing.assert_array_equal(a.data, b.data)
      assert np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()

  jax.tree.map(check, actual, expected)


def assert_shards_close(
  actual: jax.Array, expected: np.ndarray, rtol: float, atol: float = 0.0
) -> None:
  """Fails unless this process's shards of `actual` are near to `expected`.

  For results that the numeric contract leaves to XLA, such as matmuls.
  """
  assert actual.shape == expected.shape
  for shard in actual.addressable_shards:
    np.testing.assert_allclose(
      np.asarray(shard.data, np.float64),
      np.asarray(expected, np.float64)[shard.index],
      rtol,
      atol,
      err_msg=f"shard on {shard.device}, global index {shard.index}",
    )


def _bits(array: np.ndarray) -> np.ndarray:
  return array.view(f"u{array.dtype.itemsize}")
