# SPDX-License-Identifier: Apache-2.0
"""EP domains, devices and processes of a mesh.

All processes compute the same results from the same mesh.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import jax
import numpy as np

from ep._src.base import arguments

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


def check(what: str, mesh: Any) -> None:
  """Raises unless `mesh` is a mesh with at least one device."""
  if not isinstance(mesh, Mesh):
    raise arguments.wrong_type(what, "mesh", mesh, "a jax.sharding.Mesh")
  arguments.check(
    mesh.size > 0,
    what,
    f"mesh = {dict(mesh.shape)} has no devices; make one of jax.devices().",
  )


def has_devices(mesh: Mesh) -> TypeGuard[jax.sharding.Mesh]:
  """Returns whether the mesh has devices, unlike an `AbstractMesh`."""
  return not isinstance(mesh, jax.sharding.AbstractMesh)


def platform(mesh: jax.sharding.Mesh) -> str:
  """Returns the platform of a mesh's devices, such as "cpu"."""
  return str(mesh.devices.flat[0].platform)


def domains(mesh: jax.sharding.Mesh, axis_name: str) -> np.ndarray:
  """Returns the mesh's devices as an array [num_domains, P], in mesh order."""
  axis = mesh.axis_names.index(axis_name)
  return np.moveaxis(mesh.devices, axis, -1).reshape(-1, mesh.shape[axis_name])


def processes(mesh: Mesh) -> list[int]:
  """Returns the processes that have devices in the mesh, in ascending order.

  For an `AbstractMesh`, the list contains only this process.
  """
  if not has_devices(mesh):
    return [jax.process_index()]
  return sorted({d.process_index for d in mesh.devices.flat})
