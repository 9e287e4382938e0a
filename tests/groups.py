# SPDX-License-Identifier: Apache-2.0
"""Makes groups and layers for the backend under test."""

import contextlib
import copy
import dataclasses
import functools
import math
import os

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
import pytest

from conftest import make_mesh, TIMEOUT_S
import ep

# The backend of the ops under test; None selects the platform's default.
BACKEND = os.environ.get("EP_TEST_BACKEND")

# On GPUs, results differ from the contract by rounding, sizes have limits, and
# errors are reported later (docs/gpu.md).
GPU = jax.default_backend() == "gpu"

# Tokens per rank, hidden size, experts, choices per token.
T, H, E, K = 5, 7, 8, 3

MESHES = {
  "ep4": {"ep": 4},
  "ep2": {"ep": 2},
  "dp2_ep2": {"dp": 2, "ep": 2},
  "dp4_ep1": {"dp": 4, "ep": 1},
  "ep2_dp2": {"ep": 2, "dp": 2},
}


def not_with_xla(reason):
  """Marks a test of a property that backend="xla" does not have."""
  return pytest.mark.skipif(BACKEND == "xla", reason=f"xla: {reason}")


# Marks tests to run in one process only. But on GPUs, each rank is a process.
of_one_process = pytest.mark.skipif(
  jax.process_count() > 1 and not GPU, reason="one process suffices"
)

not_on_gpus = pytest.mark.skipif(GPU, reason="nccl rounds in another order")

has_no_limits = pytest.mark.skipif(
  GPU and BACKEND != "xla", reason="nccl allocates buffers of given sizes"
)


def bootstrap(mesh, **overrides):
  """Returns a new group with sizes T, H, E and K; the caller finalizes it."""
  options = dict(
    num_experts=E,
    max_tokens_per_rank=T,
    hidden_dim=H,
    top_k=K,
    max_token_dtype=jnp.float32,
    timeout_s=TIMEOUT_S,
    backend=BACKEND,
  )
  return ep.ep_bootstrap(mesh, **(options | overrides))


@contextlib.contextmanager
def within_limits():
  """Skips the test, with the error as reason, if a size exceeds a GPU limit."""
  try:
    yield
  except ValueError as e:
    if GPU and ("NCCL EP's limit" in str(e) or 'backend = "nccl"' in str(e)):
      pytest.skip(str(e))
    raise


@contextlib.contextmanager
def failing(group):
  """Expects an `EpError` of the group in the block; yields pytest's error."""
  with pytest.raises(ep.EpError) as error:
    yield error
    group.raise_failures()


@functools.cache
def group(mesh="ep4", axis_type=AxisType.Auto, **options):
  """Returns a group that all tests of this process share."""
  axes = MESHES[mesh]
  with within_limits():
    return bootstrap(make_mesh(axes, (axis_type,) * len(axes)), **options)


def layer(mesh="ep4", axis_type=AxisType.Auto, **options):
  """Returns a layer of a shared group.

  On GPUs the options determine the group's maximum capacity.
  """
  sizes = ("alignment", "top_k") if GPU else ()
  shared = {k: options[k] for k in sizes if k in options}
  return ep.EpLayerConfig(group(mesh, axis_type, **shared), **options)


def with_values(group, **changes):
  """Returns a copy of the group with other configuration values."""
  connection = copy.copy(group.connection)
  connection.group = dataclasses.replace(connection.group, **changes)
  return dataclasses.replace(connection.group, connection=connection)


def ranks(layer):
  """Returns the number of ranks with distinct tokens."""
  shape = layer.group.mesh.shape
  return math.prod(shape[axis] for axis in _axes(layer))


def _axes(layer):
  return (*layer.group.data_axes, layer.group.axis_name)


def spec(layer):
  return PartitionSpec(_axes(layer))
