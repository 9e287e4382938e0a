# SPDX-License-Identifier: Apache-2.0
"""Splits four ranks into the mesh axes (dp, ep) in every way."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np

import ep

RANKS = 4
SHAPES = ((4, 1), (2, 2), (1, 4))


def bootstrap(
  shape: tuple[int, int], config: ep.MoEConfig, tokens: int
) -> ep.EpGroup:
  """Makes a group for a layer with so many tokens of a rank."""
  axes = ("dp", "ep")
  mesh = jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(axes))
  return ep.ep_bootstrap(
    mesh,
    num_experts=config.num_experts,
    max_tokens_per_rank=tokens,
    hidden_dim=config.hidden,
    top_k=config.top_k,
    max_token_dtype=jnp.float32,
  )


def title(group: ep.EpGroup) -> str:
  """Returns the shape of a group's mesh, like "2 x 2"."""
  return " x ".join(map(str, group.mesh.shape.values()))


def both_kinds(config: ep.MoEConfig) -> dict[str, ep.MoEConfig]:
  """Returns a config with and without `deterministic`, by name."""
  return {
    name: dataclasses.replace(config, deterministic=name != "plain")
    for name in ("plain", "deterministic")
  }


def put(group: ep.EpGroup, array: np.ndarray, spec: PartitionSpec) -> jax.Array:
  """Returns an array that each process has whole as one of all ranks."""
  sharding = NamedSharding(group.mesh, spec)
  return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
