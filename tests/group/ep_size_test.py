# SPDX-License-Identifier: Apache-2.0
"""A result does not depend on how many ranks share the experts."""

import jax
import jax.numpy as jnp
import numpy as np

from cases import assert_same, Case, global_view, jit_quickly
from groups import layer
from op_functions import block_and_back
from parameters import DTYPES

MESHES = ["dp4_ep1", "dp2_ep2", "ep4"]  # EP sizes 1, 2 and 4


def local_results(mesh, dtype):
  """Returns this process's part of the results, the same part for each mesh."""
  case = Case(layer(mesh), "with_unused_choices")
  # Square roots as weights make products inexact.
  inputs = case.tokens(dtype), np.sqrt(case.weights()), case.tokens(dtype)
  # XLA may round optimized code of other shapes differently.
  program = jit_quickly(global_view(case.layer, block_and_back))
  args = jax.tree.map(case.put, [case.routing, *inputs])
  return jax.tree.map(local_numpy, program(*args))


def local_numpy(array):
  shards = sorted(array.addressable_shards, key=lambda s: s.index[0].start)
  return np.concatenate([np.asarray(s.data) for s in shards])


@DTYPES
def test_forward_and_backward(dtype):
  first, *others = [local_results(mesh, dtype) for mesh in MESHES]
  for other in others:
    assert_same(jax.tree.map(jnp.asarray, other), first)
