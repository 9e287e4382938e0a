# SPDX-License-Identifier: Apache-2.0
"""The backends by name.

Each is a module with

  FUSES_WEIGHTS: whether its combine scales rows by weights.
  ANY_PLACES: whether its ops run on any mesh of the group's axes; otherwise a
    device must be where the group's mesh has it.
  ONE_CAPACITY: whether all layers of a group have the same capacity.
  check_mesh(mesh, axis_name): raises `CannotServe` if it cannot serve the mesh.
  connect(group): connects the ranks of the group, which it knows by name from
    then on. Collective; raises `CannotServe`, on every process, if it cannot
    serve the processes.
  close(name): ends what `connect` began.
  release(name): ends it when the programs that use the group have died.
  close_released(): ends, at exit, what `release` has not ended yet.
  check(name): waits for the device; raises what no op has reported.
  memory(name): bytes of host memory that the group keeps: reserved, resident.
  mem_bytes(layer, num_tokens): bytes of `EpHandle.mem`.
  lower(op, ctx, *operands, params): lowers one of `ffi.OPS`.
"""

from __future__ import annotations

from ep._src import host_backend, nccl_backend, xla_backend

BACKENDS = {"host": host_backend, "nccl": nccl_backend, "xla": xla_backend}

# Of a platform, as `jax.Device.platform` calls it: tried before "xla".
NATIVE = {"cpu": "host", "gpu": "nccl"}
