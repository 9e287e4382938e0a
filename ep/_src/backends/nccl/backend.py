# SPDX-License-Identifier: Apache-2.0
"""The backend "nccl": NVIDIA GPUs from Hopper on, through NCCL EP."""

from __future__ import annotations

import base64
import collections
from collections.abc import Callable
import contextlib
import dataclasses
import functools
import os
import socket
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from ep._src.backends.nccl import environment, installation
from ep._src.backends.nccl.peers import Lookout
from ep._src.base import compat, meshes
from ep._src.base.backend import Backend, CannotServe, Join
from ep._src.base.compat import LoweringContext
from ep._src.base.group import Connection, EpGroup, Sizes
from ep._src.base.layer import EpLayerConfig
from ep._src.base.meshes import Mesh
from ep._src.native import connection, ffi

_MIN_COMPUTE_CAPABILITY = 9.0

# "xla": groups borrow XLA's communicators. "own": groups create communicators.
_COMMUNICATOR = "EP_NCCL_COMMUNICATOR"


class NcclBackend(Backend):
  """A backend for GPUs that NCCL EP supports, one for each process.

  With borrowed communicators, a process may have several GPUs of one EP domain.
  """

  def check_mesh(self, mesh: Mesh, axis_name: str) -> None:
    mesh = connection.mesh_of_devices("nccl", mesh)
    what = 'ep_bootstrap: backend = "nccl" '
    for device in mesh.devices.flat:
      if device.platform != "gpu":
        raise CannotServe(
          f"{what}needs a mesh of NVIDIA GPUs, not of {device.platform!r}"
          " devices; use backend=None, which picks by platform."
        )
      _check_capability(device)
    if mesh.shape[axis_name] < 2:
      raise CannotServe(
        f"{what}needs at least two ranks in a domain, but mesh axis"
        f" {axis_name!r} has one; give the axis more devices."
      )
    of_process = collections.defaultdict(list)  # domain of each GPU, by process
    for (domain, _), device in np.ndenumerate(meshes.domains(mesh, axis_name)):
      of_process[device.process_index].append(domain)
    for process, domains in of_process.items():
      if len(domains) > 1 and _communicator() == "own":
        raise CannotServe(
          f"{what}needs one process per GPU, but process {process} has"
          f" {len(domains)} GPUs of the mesh; start a process for each and give"
          " it one with jax.distributed.initialize(local_device_ids=...) or"
          f" CUDA_VISIBLE_DEVICES, or set {_COMMUNICATOR}=xla (docs/gpu.md)."
        )
      if len(set(domains)) > 1:
        raise CannotServe(
          f"{what}needs the GPUs of a process in one EP domain, but the GPUs of"
          f" process {process} are in {len(set(domains))}; give mesh axis"
          f" {axis_name!r} all GPUs of a process, or start more processes"
          " (docs/gpu.md)."
        )

  def check_sizes(self, group: EpGroup) -> None:
    for name in ("max_tokens_per_rank", "hidden_dim"):
      _size(group, name)
    if group.top_k is None and group.recv_capacity_per_rank is None:
      raise ValueError(
        'ep_bootstrap: backend = "nccl" allocates for the largest capacity of'
        " the group's layers; pass the largest top_k of the layers, or"
        " recv_capacity_per_rank."
      )

  def probe(self) -> str:
    devices = jax.local_devices()
    if devices[0].platform != "gpu":
      try:
        library = f"Its library is there, {ffi.find_library('nccl')}."
      except FileNotFoundError:
        library = (
          "With a driver for them, install the wheel of jax-ep-cuda13, or"
          " jax-ep-cuda12."
        )
      raise CannotServe(
        f"it needs NVIDIA GPUs, and JAX has none here. {library}"
      )
    for device in devices:
      _check_capability(device)
    environment.check()
    libraries = installation.prepare(devices[0])
    return ", ".join(filter(None, [ffi.path_and_interface("nccl"), *libraries]))

  def connect(self, group: EpGroup, join: Join) -> Connection:
    me = jax.process_index()
    mesh = connection.mesh_of_devices("nccl", group.mesh)
    domains = meshes.domains(mesh, group.axis_name)
    places = np.argwhere(np.vectorize(lambda d: d.process_index == me)(domains))
    domain = int(places[0, 0])
    ranks = {int(r): domains[domain, r] for r in places[:, 1]}
    device = next(iter(ranks.values()))

    # `join` calls `introduce`, and fails on all processes if it raises. So no
    # process waits in a collective of NCCL EP for one that refuses.
    def introduce() -> dict[str, Any]:
      self.check_sizes(group)
      environment.check()
      ffi.library("nccl")
      nccl, nccl_ep = installation.prepare(device)
      ffi.create_nccl_group(
        group=group,
        ranks={r: d.local_hardware_id for r, d in ranks.items()},
        domain=domain,
        max_tokens=_size(group, "max_tokens_per_rank"),
        capacity=_capacity(group),
        max_row_bytes=_padded_width(_size(group, "hidden_dim"))
        * group.max_token_dtype.itemsize,
        nccl=nccl,
        nccl_ep=nccl_ep,
      )
      stack.callback(ffi.close_group, "nccl", group.name)
      is_founder = _communicator() == "own" and 0 in ranks
      unique_id = ffi.new_nccl_id(nccl, nccl_ep) if is_founder else b""
      # NCCL EP also compares the names that gethostname() returns.
      return dict(
        id=base64.b64encode(unique_id).decode(), host=socket.gethostname()
      )

    def connect() -> dict[str, Any]:
      if _communicator() == "xla":
        _borrow(group, mesh)
      founder = answers[domains[domain, 0].process_index]
      hosts = {answer["host"] for answer in answers.values()}
      unique_id = base64.b64decode(founder["id"])
      ffi.connect_nccl_group(group.name, unique_id, len(hosts))
      return {}

    with contextlib.ExitStack() as stack:
      answers = join(group, introduce, domain, environment.settings())
      join(group, connect, domain)
      ffi.open_nccl_group(group.name)
      stack.pop_all()
    capacity = _capacity(group)
    group = dataclasses.replace(group, recv_capacity_per_rank=capacity)
    members = [d.process_index for d in domains[domain]]
    lookouts = [
      Lookout(
        *(group.name, domain, rank, members, group.timeout_s),
        functools.partial(ffi.nccl_place, group.name, i),
      )
      for i, rank in enumerate(ranks)
    ]
    return NcclConnection(group, _communicator() == "xla", lookouts)


class NcclConnection(connection.NativeConnection):
  """A connection to a group of NCCL EP."""

  weighs = False

  def __init__(self, group: EpGroup, borrows: bool, lookouts: list[Lookout]):
    """Takes `borrows`: whether the group borrows XLA's communicators."""
    super().__init__(group)
    self._borrows = borrows
    self._lookouts = lookouts

  def lower(
    self, op: str, ctx: LoweringContext, *operands: Any, sizes: Sizes
  ) -> Any:
    lower = functools.partial(super().lower, op, sizes=sizes)
    if op == "ep_dispatch_bwd":
      lower = functools.partial(_in_one_result, lower)
    if op != "ep_prepare":
      lower = functools.partial(_with_fitting_rows, lower)
    return lower(ctx, *operands)

  def _call(
    self, op: str, ctx: LoweringContext, *operands: Any, **options: Any
  ) -> Any:
    if self._borrows:
      options |= _domains(self.group, compat.program_mesh(ctx))
    call = functools.partial(super()._call, op, **options)
    return compat.on_collective_stream(call)(ctx, *operands)

  def _close(self) -> None:
    self._stop_lookouts()
    super()._close()

  def _release(self) -> None:
    self._stop_lookouts()
    super()._release()

  def _stop_lookouts(self) -> None:
    for lookout in self._lookouts:
      lookout.stop()


def _communicator() -> str:
  """Returns which communicators the environment selects, "own" or "xla"."""
  value = os.environ.get(_COMMUNICATOR) or "own"
  if value not in ("own", "xla"):
    raise ValueError(
      f'ep_bootstrap: ${_COMMUNICATOR} is {value!r}; set it to "xla", or to'
      ' "own", which is the default.'
    )
  return value


def _borrow(group: EpGroup, mesh: jax.sharding.Mesh) -> None:
  """Gives the native group XLA's communicators. Collective over the mesh.

  Runs a program, because only a running program gets XLA's communicators.
  """

  def connect() -> Any:
    shape = jax.ShapeDtypeStruct((1,), jnp.int32)
    call = jax.ffi.ffi_call("ep_connect", shape, has_side_effect=True)
    return call(group=group.name, **_domains(group, mesh))

  program = jax.shard_map(
    connect,
    mesh=mesh,
    in_specs=(),
    out_specs=jax.sharding.PartitionSpec(mesh.axis_names),
    check_vma=False,
  )
  jax.block_until_ready(jax.jit(program)())


def _domains(group: EpGroup, mesh: Mesh) -> dict[str, Any]:
  """Returns the mesh's shape and EP axis, as attributes of the handlers."""
  return dict(
    lent_mesh=np.array([*mesh.shape.values()], np.int64),
    lent_axis=np.int64([*mesh.shape].index(group.axis_name)),
  )


def _capacity(group: EpGroup) -> int:
  """Returns the largest capacity of the group's layers."""
  return EpLayerConfig(group, top_k=group.top_k or 1).capacity


def _size(group: EpGroup, name: str) -> int:
  """Returns a size of the group; raises `ValueError` if it is None."""
  size: int | None = getattr(group, name)
  if size is None:
    raise ValueError(
      f'ep_bootstrap: backend = "nccl" allocates its buffers now, and {name} is'
      " None; pass the largest of any op (ep_resize changes it), or"
      ' backend="xla", which allocates nothing.'
    )
  return size


def _padded_width(hidden: int, itemsize: int = 2) -> int:
  """Returns `hidden`, rounded up to a row width that NCCL EP supports."""
  multiple = 16 if itemsize == 1 else 8
  return -(-hidden // multiple) * multiple


def _with_fitting_rows(
  lower: Callable[..., Any], ctx: LoweringContext, *operands: Any
) -> Any:
  """Lowers an op, with rows padded to a width that NCCL EP supports."""
  rows: Any  # an `AbstractValue` with a shape
  (_, rows, *_), (moved, *others) = ctx.avals_in, ctx.avals_out
  hidden = rows.shape[1]
  width = _padded_width(hidden, rows.dtype.itemsize)
  if width == hidden:
    return lower(ctx, *operands)

  def fit(mem: Any, rows: Any, *weights: Any) -> list[Any]:
    return [mem, jnp.pad(rows, ((0, 0), (0, width - hidden))), *weights]

  def cut(rows: Any, *weights: Any) -> list[Any]:
    return [rows[:, :hidden], *weights]

  fitting = [
    jax.core.ShapedArray(x.shape, x.dtype)
    for x in jax.eval_shape(fit, *ctx.avals_in)
  ]
  operands = compat.lower_local(fit)(ctx, *operands)
  ctx = ctx.replace(avals_in=fitting)
  wide = jax.core.ShapedArray((moved.shape[0], width), moved.dtype)
  outs = lower(ctx.replace(avals_out=[wide, *others]), *operands)
  return compat.lower_local(cut)(ctx.replace(avals_in=[wide, *others]), *outs)


def _in_one_result(
  lower: Callable[..., Any], ctx: LoweringContext, *operands: Any
) -> Any:
  """Lowers an op to a call with one flat result: the rows, then the weights."""
  rows: Any
  weights: Any
  rows, weights = ctx.avals_out
  parts = weights.dtype.itemsize // rows.dtype.itemsize
  num_elements = rows.size + weights.size * parts
  both = jax.core.ShapedArray((num_elements,), rows.dtype)

  def split(x: jax.Array) -> list[jax.Array]:
    bits = x[rows.size :].reshape(*weights.shape, parts)
    floats = lax.bitcast_convert_type(bits, jnp.float32)
    return [x[: rows.size].reshape(rows.shape), floats.reshape(weights.shape)]

  results = lower(ctx.replace(avals_out=[both]), *operands)
  return compat.lower_local(split)(ctx.replace(avals_in=[both]), *results)


def _check_capability(device: jax.Device) -> None:
  capability = getattr(device, "compute_capability", "none")
  try:
    is_enough = float(capability) >= _MIN_COMPUTE_CAPABILITY
  except ValueError:  # not a number, like "gfx942" of another vendor
    is_enough = False
  if not is_enough:
    raise CannotServe(
      'ep_bootstrap: backend = "nccl" needs compute capability'
      f" {_MIN_COMPUTE_CAPABILITY} (Hopper) or newer, but {device}"
      f" ({device.device_kind}) has {capability}."
    )
