# SPDX-License-Identifier: Apache-2.0
"""The names of mesh axes."""

import contextlib
import dataclasses
import warnings

import jax
from jax.interpreters import pxla


@dataclasses.dataclass
class MeshResource:
  """The mesh axis of each kind of parallelism, or None."""

  dp_resource: str | None = None
  tp_resource: str | None = None
  tpsp_resource: str | None = None
  fsdp_resource: str | None = None
  pp_resource: str | None = None
  cp_resource: str | None = None
  ep_resource: str | None = None


# MaxText enters `global_shard_guard` on GPUs only, so these are its axes.
_resource = MeshResource("data", fsdp_resource="fsdp", ep_resource="expert")


@contextlib.contextmanager
def global_shard_guard(resource: MeshResource):
  """Names the mesh axes inside a `with` block."""
  global _resource
  outer, _resource = _resource, resource
  try:
    yield
  finally:
    _resource = outer


def global_mesh_resource() -> MeshResource:
  """Returns the axes of the innermost `global_shard_guard`."""
  return _resource


def get_mesh() -> jax.sharding.Mesh:
  """Returns the mesh of `jax.set_mesh`, or of `with mesh`."""
  mesh = jax.sharding.get_mesh()
  if mesh.empty:
    with warnings.catch_warnings(action="ignore"):  # it is deprecated
      mesh = pxla.thread_resources.env.physical_mesh
  return mesh
