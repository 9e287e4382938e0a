"""The backends by name.

Each is a module with

  FUSES_WEIGHTS: whether its combine scales rows by weights.
  ONE_CAPACITY: whether all layers of a group have the same capacity.
  check_mesh(mesh, axis_name): raises `ValueError` if it cannot serve the mesh.
  connect(group): builds the native group. Collective.
"""

from __future__ import annotations

from ep._src import host_backend, nccl_backend

BACKENDS = {"host": host_backend, "nccl": nccl_backend}

# The backend of a platform, as `jax.Device.platform` calls it.
DEFAULTS = {"cpu": "host", "gpu": "nccl"}
