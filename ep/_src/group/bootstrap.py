# SPDX-License-Identifier: Apache-2.0
"""`ep_bootstrap`, `ep_resize` and `ep_finalize`.

Only this file imports all backends.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator
import contextlib
import dataclasses
import logging
import math
import sys
from typing import Any, TypedDict, Unpack
import weakref

import jax.numpy as jnp
from jax.typing import DTypeLike

from ep._src.backends.host import HostBackend
from ep._src.backends.nccl.backend import NcclBackend
from ep._src.backends.xla.backend import XlaBackend
from ep._src.base import arguments, meshes
from ep._src.base.backend import Backend, CannotServe
from ep._src.base.group import (
  check_group,
  EpGroup,
  open_connections,
  wait_for_programs,
)
from ep._src.base.layer import EpLayerConfig
from ep._src.group import ending, rendezvous
from ep._src.native.connection import close_released, released

BACKENDS: dict[str, Backend] = {
  "host": HostBackend(),
  "nccl": NcclBackend(),
  "xla": XlaBackend(),
}

# The default backend for each `jax.Device.platform`. If that backend cannot
# serve the mesh, the default is "xla".
NATIVE = {"cpu": "host", "gpu": "nccl"}

# Common names of axes along which tokens are replicated.
_MODEL_AXES = {"mp", "model", "pipe", "pp", "stage", "tensor", "tp"}

_logger = logging.getLogger("ep")


# Python runs this exit handler before the handlers of JAX, which was imported
# earlier. JAX's handlers may wait for peers that wait for this process.
@atexit.register
def _close_all() -> None:
  """Waits for the programs of groups with peers; closes the groups.

  After an uncaught exception, closes without a wait: peers fail immediately.
  """
  closing = [c for c in open_connections() if c.closes_at_exit]
  try:
    with contextlib.ExitStack() as stack:
      for connection in closing:
        stack.callback(connection.close)
      stack.callback(close_released)
      if not hasattr(sys, "last_value"):  # there was no uncaught exception
        groups = [connection.group for connection in closing]
        wait_for_programs("ep", groups + released())
  except Exception as e:
    print(f"At exit: {e}", file=sys.stderr)
    # Python ignores errors in exit handlers, and might exit with code 0.
    ending.exit_now(ending.exit_code())


def _check(group: EpGroup) -> Backend:
  """Returns a group's backend; raises if the backend cannot serve the group."""
  chosen = BACKENDS[group.backend]
  chosen.check_mesh(group.mesh, group.axis_name)
  try:
    # If top_k is None, check sizes for top_k = 1, which needs the fewest rows.
    EpLayerConfig(group, top_k=1 if group.top_k is None else group.top_k)
  except ValueError as e:
    raise ValueError(
      f"ep_bootstrap: a layer of only defaults fails: {e}"
    ) from e
  return chosen


def _connect(group: EpGroup) -> EpGroup:
  connection = _check(group).connect(group, rendezvous.join)
  connected = dataclasses.replace(connection.group, connection=connection)
  weakref.finalize(connected, connection.release).atexit = False
  return connected


def _connect_by_platform(group: EpGroup) -> EpGroup:
  """Connects a group with the platform's native backend, or else with "xla"."""
  native = None
  if meshes.has_devices(group.mesh):
    native = NATIVE.get(meshes.platform(group.mesh))
  if native:
    try:
      return _connect(dataclasses.replace(group, backend=native))
    except CannotServe as why:
      _logger.warning('group "%s" uses backend = "xla": %s', group.name, why)
  return _connect(group)


def ep_bootstrap(
  mesh: meshes.Mesh,
  *,
  axis_name: str = "ep",
  data_axes: tuple[str, ...] | None = None,
  num_experts: int,
  max_tokens_per_rank: int | None = None,
  hidden_dim: int | None = None,
  top_k: int | None = None,
  recv_capacity_per_rank: int | None = None,
  alignment: int = 1,
  max_token_dtype: DTypeLike = jnp.float32,
  overflow: str = "error",
  drop_by: str | None = None,
  backend: str | None = None,
  errors: str | None = None,
  max_num_sms: int = 0,
  timeout_s: float = 300.0,
  exit_after_s: float = math.inf,
  name: str | None = None,
) -> EpGroup:
  """Builds the EP domains of a mesh and connects their ranks.

  Collective: all processes that have devices in the mesh call it, with the same
  arguments and in the same order relative to other bootstraps. A domain is the
  set of ranks that differ only in their coordinate along `axis_name`.

  Args:
    mesh: a mesh of devices, with the axis `axis_name`. With an `AbstractMesh`
      the group connects nothing, its backend is "xla", and it is for work
      without devices: `jax.eval_shape`, lowering and `jax.export` for any
      platform. Processes need not agree on such a group.
    axis_name: the EP axis; its size is P.
    data_axes: the other axes that shard tokens. Default: all other axes, with a
      warning if the name of one, like "tp", suggests that it shards a model.
      Along the remaining axes tokens are replicated, and each coordinate has a
      separate domain for its copy.
    num_experts: E. Each rank has L = ceil(E / P) expert slots, and expert `e`
      lives on EP rank `e // L`. If P does not divide E, the last slots are
      empty: no id names them, and they receive no rows.
    max_tokens_per_rank: the largest number of tokens T of a rank in one op, or
      None for no limit. "nccl" allocates buffers for it, and needs a number.
    hidden_dim: the largest hidden size H, or None for no limit. "nccl" also
      needs a number here.
    top_k: the default K of a layer; None if each layer states its own.
    recv_capacity_per_rank: the default capacity C of a layer, in rows. None is
      the worst case of `max_tokens_per_rank`, or else of the tokens of each op,
      so that no op overflows. "nccl" allocates buffers for C, by default for
      the worst case of `top_k` and `alignment`, so it needs this or `top_k`; a
      layer may have a smaller C, but no larger one.
    alignment: the default alignment of a layer's slabs, in rows; 0 and 1 are no
      alignment.
    max_token_dtype: the widest dtype of tokens: float32, bfloat16 or float16.
      Buffers of "nccl" have rows of this dtype. With other backends a wider
      dtype costs nothing.
    overflow: the default policy of a layer: "error", "drop" or "chunk"; see
      `EpLayerConfig`.
    drop_by: which choices a layer drops by default, "slot", "fair" or None; see
      `EpLayerConfig`.
    backend: "host" (CPU devices of one host), "nccl" (NVIDIA GPUs from Hopper
      on, one process for each, P > 1) or "xla" (all platforms of XLA, without
      native code). None picks "host" or "nccl" by platform. If that backend
      cannot serve the mesh, None picks "xla", and logs the reason to the logger
      "ep".
    errors: what programs of "xla" do with a fault of `ep_prepare`. With "raise"
      they raise it, by a callback into Python, so JAX's persistent compilation
      cache keeps none of them. With "flag" they have no callback: the handle
      and `ep.moe.Metrics` carry the fault, `ep.check` raises it, and all rows
      of that handle are NaN. None is "raise" on CPUs and "flag" on other
      devices. No effect with "host" and "nccl", and in checked mode.
    max_num_sms: streaming multiprocessors that "nccl" may use, at most 16; 0
      lets it choose. No effect on CPU.
    timeout_s: seconds until a rank that waits for its peers raises an error,
      here, in every op and at exit; `math.inf` for never.
    exit_after_s: seconds after the failure of an op on any rank until a process
      of "host" terminates, with exit code 70 and the failure as message;
      `math.inf` for never. The process does not terminate if it has closed the
      group by then, or has run another op of the group on each of its devices.
      Without this limit, a device that waits for a failed rank in a collective
      of XLA may wait indefinitely, and its process raises no error. A process
      of "nccl" terminates if an op has made no progress on its GPU for
      `timeout_s + exit_after_s`, so this time must exceed the longest
      compilation or checkpoint of a peer. No effect with "xla".
    name: the name of the group, unique among the live groups of the process and
      equal on all processes; it is part of the compiled program. Default: a
      serial number.

  Returns:
    The group. Close it with `ep_finalize`, or use it as a context manager.

  Raises:
    ValueError: an argument is out of range or differs between processes, or the
      name is taken.
    TypeError: an argument has a wrong type.
    RuntimeError: the processes cannot be connected.
    FileNotFoundError: the native library is missing.
  """
  meshes.check("ep_bootstrap", mesh)
  arguments.one_of(None, *BACKENDS)("ep_bootstrap", "backend", backend)
  if data_axes is None:
    data_axes = tuple(a for a in mesh.axis_names if a != axis_name)
    _warn_of_model_axes(mesh, data_axes)
  group = EpGroup(
    name="" if name is None else name,
    mesh=mesh,
    axis_name=axis_name,
    data_axes=data_axes,
    num_experts=num_experts,
    max_tokens_per_rank=max_tokens_per_rank,
    hidden_dim=hidden_dim,
    top_k=top_k,
    recv_capacity_per_rank=recv_capacity_per_rank,
    alignment=alignment,
    max_token_dtype=max_token_dtype,  # type: ignore[arg-type]
    overflow=overflow,
    drop_by=drop_by,
    backend=backend or "xla",
    errors=errors,
    max_num_sms=max_num_sms,
    timeout_s=timeout_s,
    exit_after_s=exit_after_s,
  )
  # Invalid arguments must not use up a serial number for a default name.
  group = dataclasses.replace(group, name=rendezvous.group_name(mesh, name))
  return _connect(group) if backend else _connect_by_platform(group)


def _warn_of_model_axes(mesh: meshes.Mesh, axes: tuple[str, ...]) -> None:
  """Warns if an axis that shards tokens is named like a model axis."""
  of_model = [a for a in axes if a in _MODEL_AXES and mesh.shape[a] > 1]
  if of_model:
    rest = tuple(a for a in axes if a not in of_model)
    arguments.warn(
      f"ep_bootstrap: the mesh axes {of_model} shard tokens, as all axes do by"
      f" default. If tokens are replicated along them, pass data_axes={rest};"
      f" if not, data_axes={axes}, and there is no warning."
    )


def ep_finalize(group: EpGroup) -> None:
  """Closes a group: its later ops fail, on every rank. Idempotent.

  No effect in a forked child of the process that bootstrapped the group.

  Running ops fail immediately: wait for their results first, or use a `with
  group` block, which waits. You need not clear JAX's caches, because compiled
  programs keep only the name of the group.

  Raises:
    ValueError, RuntimeError: the failure of an op that no op has raised (see
      `EpGroup.raise_failures`), or a peer has run ops that this process has
      not. The group is closed nevertheless.
  """
  check_group("ep_finalize", group)
  group.connection.close(check=True)


class Sizes(TypedDict, total=False):
  """The arguments of `ep_bootstrap` that `ep_resize` can change."""

  max_tokens_per_rank: int | None
  hidden_dim: int | None
  max_token_dtype: DTypeLike
  top_k: int | None
  recv_capacity_per_rank: int | None


@contextlib.contextmanager
def _named_resize() -> Iterator[None]:
  """Replaces "ep_bootstrap" by "ep_resize" in errors that the block raises."""
  try:
    yield
  except (ValueError, TypeError, RuntimeError) as e:
    e.args = (str(e).replace("ep_bootstrap", "ep_resize"),)
    raise


@_named_resize()
def ep_resize(group: EpGroup, **sizes: Unpack[Sizes]) -> EpGroup:
  """Replaces a group by a group with other sizes, on the same mesh.

      group = ep.ep_resize(group, max_tokens_per_rank=8192)
      layer = ep.MoE(cfg, group)  # and trace the programs again

  Collective: all processes of the mesh call it with the same sizes. The
  processes wait for the programs that they have launched, and agree on the
  sizes. Then `ep_resize` closes the group like `ep_finalize`, and calls
  `ep_bootstrap` with the old arguments and the new sizes.

  With "nccl", whose buffers have the sizes of the group, a larger step needs
  `ep_resize`. "host" and "xla" behave alike, so that a program for GPUs runs on
  CPUs, but there a group without `max_tokens_per_rank` and `hidden_dim` has no
  limits.

  The new group has the name of the old group. Objects of the old group do not
  work with the new group:

  * make layers again, from the new group. Tracing an old layer or its handles
    raises an error;
  * call `jax.jit` on functions that use the new layers. A program that was
    compiled for the old group fails, as after `ep_finalize`. With "xla" it
    still runs, because it consists of XLA's collectives.

  Arrays, such as parameters, do not belong to a group, and remain valid.

  Args:
    group: an open group. If the processes accept the sizes, the call closes the
      group, even if the new group fails for lack of memory. If `group`
      is used as a context manager, use the new group in the same way:
      `with ep.ep_resize(group, ...) as larger:`.
    **sizes: `max_tokens_per_rank`, `hidden_dim`, `max_token_dtype`, `top_k` and
      `recv_capacity_per_rank`, as in `ep_bootstrap`. The defaults are the
      values of `group`, except for `recv_capacity_per_rank`, whose default is
      the worst case of the new sizes.

  Returns:
    The new group.

  Raises:
    ValueError, TypeError, RuntimeError: on all processes, if a size is wrong or
      differs between processes, or a program does not end within `timeout_s`;
      or like `ep_finalize` and `ep_bootstrap`.
    TypeError: a keyword is not one of these sizes.
  """
  if unknown := sizes.keys() - Sizes.__annotations__.keys():
    raise TypeError(
      f"ep_resize: {min(unknown)} cannot change; the sizes are"
      f" {', '.join(Sizes.__annotations__)}. For anything else, finalize the"
      " group and bootstrap another one."
    )
  cure = "pass the group that it replaces"
  arguments.check_type("ep_resize", "group", group, EpGroup, cure)
  group.connection.check_open("ep_resize")

  def propose() -> EpGroup:
    wait_for_programs("ep_resize", [group])
    changes: dict[str, Any] = {"recv_capacity_per_rank": None, **sizes}
    new = dataclasses.replace(group.connection.group, **changes)
    _check(new).check_sizes(new)
    return new

  new = rendezvous.agree("ep_resize", group.connection.group, propose)
  ep_finalize(group)
  return _connect(new)
