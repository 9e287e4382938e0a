# SPDX-License-Identifier: Apache-2.0
"""Wraps unstable APIs of JAX, for jax 0.10.2 and newer.

No other module of the package imports `jax._src`, `jax.interpreters`,
`jax.experimental` or `jax.extend`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
import contextlib
import ipaddress
import os
import pathlib
import shlex
import socket
from typing import Any

import jax
from jax._src import clusters as _clusters
from jax._src import config as _config
from jax._src import core as _core
from jax._src import distributed as _distributed
from jax._src import mesh as _mesh
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import batching as _batching
from jax._src.lax.parallel import ragged_all_to_all_p as ragged_all_to_all_p
from jax.experimental import io_callback as _io_callback
from jax.extend.core import Literal as Literal
from jax.extend.core import Primitive as Primitive
from jax.interpreters import ad as ad
from jax.interpreters import batching as batching
from jax.interpreters import mlir as mlir
from jax.interpreters import partial_eval
from jax.interpreters.ad import instantiate_zeros as instantiate_zeros
import jax.numpy as jnp
from jaxlib import _jax
from jaxlib.mlir.dialects import func as _func
from jaxlib.mlir.dialects import stablehlo as _hlo
from jaxlib.version import __version_info__ as _jaxlib_version
import numpy as np

LoweringContext = mlir.LoweringRuleContext


def context_mesh() -> jax.sharding.AbstractMesh | None:
  """Returns the mesh of `jax.set_mesh` or an enclosing `shard_map`, or None."""
  mesh = jax.sharding.get_abstract_mesh()
  return None if mesh.empty else mesh


def is_on_one_device() -> bool:
  """Returns whether all axes are manual, so that arrays are on one device."""
  mesh = context_mesh()
  return mesh is not None and {*mesh.manual_axes} == {*mesh.axis_names}


def in_a_program() -> bool:
  """Returns whether the caller is being traced into a jitted program."""
  return _core.unsafe_am_i_under_a_jit()


def compiler_options() -> dict[str, str]:
  """Returns the JAX options that change how XLA compiles a program."""
  words = "optimization", "fitting", "effort", "remat_pass", "shardy"
  return {
    name: str(value)
    for name, value in jax.config.values.items()
    if any(word in name for word in words)
  }


def xla_flags() -> dict[str, str]:
  """Returns the last of each flag in XLA_FLAGS, by name: {"--a": "--a=1"}.

  As in XLA, XLA_FLAGS has flags, or the path of a file of flags.
  """
  text = os.environ.get("XLA_FLAGS", "").strip()
  if text and not text.startswith("-"):
    text = pathlib.Path(text).read_text()
  return {flag.partition("=")[0]: flag for flag in shlex.split(text)}


def concrete_context_mesh() -> jax.sharding.Mesh | None:
  """Returns the mesh of devices that `jax.set_mesh` has set, or None."""
  mesh = _mesh.get_concrete_mesh()
  return None if mesh.empty else mesh


def vary_together(*xs: Any, axes: Iterable[str] = ()) -> Any:
  """Casts all arrays to vary over the union of their mesh axes and `axes`.

  Inside `shard_map(check_vma=True)` the operands of a primitive, and the carry
  of a loop before and after a step, must vary over the same mesh axes. The
  transpose of the cast is the sum over the added axes.
  """
  if not _config._check_vma.value:
    return xs
  leaves = jax.tree.leaves(xs)
  axes = frozenset(axes).union(*(jax.typeof(x).mat.varying for x in leaves))

  def cast(x: jax.Array) -> jax.Array:
    missing = tuple(sorted(axes - jax.typeof(x).mat.varying))
    return jax.lax.pcast(x, missing, to="varying") if missing else x

  return jax.tree.map(cast, xs)


def all_gather(
  x: jax.Array,
  axis_name: str,
  *,
  axis: int,
  mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
) -> jax.Array:
  """Returns `lax.all_gather(tiled=True)`; its transpose adds the cotangents.

  Workaround (jax #40830, until jax 0.12): the transpose of `lax.all_gather`, a
  reduce-scatter, is sometimes wrong on CPUs of a distributed job, because Gloo
  corrupts the end of chunks of some MiB. There, each rank sends a copy of `x`
  to each rank, and the transpose adds the cotangents of the copies on the rank
  of `x`. Afterwards `lax.all_gather` can replace this function.

  `axis` is the dimension in which the ranks' arrays are joined, and `mesh` has
  the devices of the ranks.
  """
  is_wrong = (
    _jaxlib_version < (0, 12)
    and distributed_client() is not None
    and isinstance(mesh, jax.sharding.Mesh)
    and mesh.devices.flat[0].platform == "cpu"
  )
  if not is_wrong:
    gathered: jax.Array = jax.lax.all_gather(
      x, axis_name, axis=axis, tiled=True
    )
    return gathered
  copies = jnp.broadcast_to(x, (jax.lax.axis_size(axis_name), *x.shape))
  parts = jax.lax.all_to_all(copies, axis_name, 0, 0)
  return jnp.concatenate([*parts], axis)


def is_batched(tree: Any) -> bool:
  """Returns whether `vmap` is the innermost transformation of any leaf.

  In `vmap(grad(f))` the innermost transformation is `grad`.
  """
  current = _core.trace_ctx.trace
  return any(
    isinstance(x, _batching.BatchTracer) and x._trace is current
    for x in jax.tree.leaves(tree)
  )


def checks_vma() -> bool:
  """Returns whether JAX tracks varying mesh axes here (`check_vma=True`)."""
  return bool(_config._check_vma.value)


def out_aval(shape: Sequence[int], dtype: Any, like: Any) -> Any:
  """Returns an abstract value that varies over the mesh axes of `like`."""
  spec = jax.sharding.PartitionSpec(*[None] * len(shape))
  return like.update(
    shape=shape,
    dtype=dtype,
    weak_type=False,
    sharding=like.sharding.update(spec=spec),
  )


def varying_aval(aval: Any, axes: Iterable[str]) -> Any:
  """Returns an abstract value that also varies over `axes`."""
  varying = aval.mat.varying.union(axes)
  return aval.update(manual_axis_type=aval.mat.update(varying=varying))


def lower_local(fn: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a lowering rule that traces `fn` with one device's arrays.

  `fn` may call collectives over the axes of the enclosing `shard_map`, because
  JAX lowers the body with these axes in scope. JAX does not check varying axes
  in `fn`: `vary_together` cast the operands when the op was bound. In `fn`,
  Explicit axes that are not manual are Auto.
  """
  lower = mlir.lower_fun(fn, multiple_results=True)

  def lower_unchecked(ctx: Any, *operands: Any, **params: Any) -> Any:
    avals = [jax.core.ShapedArray(a.shape, a.dtype) for a in ctx.avals_in]
    mesh = jax.sharding.get_abstract_mesh()
    auto = dict.fromkeys(mesh.explicit_axes, jax.sharding.AxisType.Auto)
    mesh = mesh.update_axis_types(auto)
    with _config._check_vma(False), jax.sharding.use_abstract_mesh(mesh):
      return lower(ctx.replace(avals_in=avals), *operands, **params)

  return lower_unchecked


# The primitives whose lowering `lower_instead` replaced. The set is part of the
# key of JAX's caches, so JAX does not reuse programs with the old lowering.
_replaced = jax.make_user_context(default_value=frozenset())


def lower_instead(
  primitive: Primitive, rule: Callable[..., Any], platform: str
) -> Callable[[], None]:
  """Replaces the lowering of a JAX primitive; returns a function to undo it.

  Does nothing if the lowering was replaced before.
  """
  replaced = _replaced.get_global()
  if primitive in replaced:
    return lambda: None
  rules = mlir._platform_specific_lowerings[platform]
  rule_before = rules.get(primitive)
  mlir.register_lowering(primitive, rule, platform)
  _replaced.set_global(replaced | {primitive})

  def undo() -> None:
    del rules[primitive]
    if rule_before is not None:
      rules[primitive] = rule_before
    _replaced.set_global(replaced)

  return undo


def next_position(ctx: LoweringContext) -> int:
  """Returns a serial number in the lowered module, equal on all processes."""
  return ctx.module_context.new_channel()


def named_instruction(name: str) -> contextlib.AbstractContextManager[Any]:
  """Returns a context that names the instructions lowered in it.

  Profilers show the name. XLA replaces its invalid characters by "_", and
  appends a number.
  """
  context: contextlib.AbstractContextManager[Any]
  context = mlir.ir.Location.name(name, childLoc=mlir.ir.Location.current)
  return context


def is_for_cpus(ctx: LoweringContext) -> bool:
  """Returns whether JAX lowers the operation for CPUs, and perhaps for others.

  A program that `jax.export` makes may be for several platforms.
  """
  return "cpu" in (ctx.platforms or ctx.module_context.platforms)


def can_call_python(ctx: LoweringContext) -> bool:
  """Returns whether the program being lowered will run in this process."""
  module = ctx.module_context
  if module.lowering_parameters.for_export:
    return False
  try:
    return module.get_backend(optional=True) is not None
  except RuntimeError:  # JAX compiles for a GPU, and this process has none.
    return False


def local_device(ctx: LoweringContext) -> jax.Device | None:
  """Returns a device of this process that will run the operation.

  Returns None if the program may run elsewhere, if XLA partitions the
  operation, or if JAX compiles ahead of time for devices of no process.
  """
  if not can_call_python(ctx) or is_partitioned(ctx):
    return None
  client = ctx.module_context.get_backend()
  return next(iter(client.local_devices()), None) if client else None


def program_mesh(ctx: LoweringContext) -> Any:
  """Returns the mesh of the `shard_map` that JAX is lowering."""
  context = ctx.module_context.axis_context
  assert isinstance(context, mlir.SPMDAxisContext)
  return context.mesh


def is_partitioned(ctx: LoweringContext) -> bool:
  """Returns whether XLA partitions the operation among devices.

  XLA also does so inside of a `shard_map` that leaves axes automatic.
  """
  context = ctx.module_context.axis_context
  if isinstance(context, mlir.SPMDAxisContext):
    return context.manual_axes != frozenset(context.mesh.axis_names)
  return isinstance(context, mlir.ShardingContext) and context.num_devices > 1


def fail_if(
  failed: jax.Array,
  fail: Callable[..., None],
  *args: jax.Array,
  can_raise: bool,
) -> jax.Array:
  """Raises an error from inside a jitted program that has no custom call.

  If `failed`, which must be equal on all ranks, the program calls `fail` with
  `args` as NumPy arrays, and `fail` raises. Returns 0, or 1 if `failed` and the
  program cannot call Python. Later exchanges must depend on the result, so that
  no rank waits for a failed rank.
  """
  if not can_raise:
    return failed.astype(jnp.int32)
  result = jax.ShapeDtypeStruct((), jnp.int32)
  code: jax.Array = jax.lax.cond(
    failed,
    lambda *args: _io_callback(
      lambda *args: fail(*map(np.asarray, args)), result, *args
    ),
    lambda *_: jnp.int32(0),
    *args,
  )
  return code


def run_once_in_remat(primitive: Primitive) -> None:
  """Makes `jax.checkpoint`, with any policy, save a primitive's results."""

  def rule(saveable: Any, unknown: Any, instantiated: Any, eqn: Any) -> Any:
    del saveable
    outs = len(eqn.outvars)
    if not any(unknown):
      return eqn, None, [False] * outs, [False] * outs, []
    residuals = [
      x
      for x, there in zip(eqn.invars, instantiated, strict=True)
      if not there and not isinstance(x, Literal)
    ]
    return None, eqn, [True] * outs, [True] * outs, residuals

  partial_eval.partial_eval_jaxpr_custom_rules[primitive] = rule


def on_collective_stream(lower: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a lowering that runs `lower`'s operations on the collective stream.

  XLA:GPU runs a call of an annotated function on the stream of its collectives,
  in one order with them. On another stream, two communicators that overlap
  might wait for each other indefinitely. Workaround (openxla/xla#39604):
  `jax.experimental.compute_on("gpu_stream:collective")` does the same, but does
  not work inside `shard_map`. TransformerEngine also annotates a function.

  XLA also runs an operation that reads one of several results of the call on
  that stream, as if it were an exchange, and then nothing overlaps the call. A
  call with one result has no such operation. An optimization barrier that takes
  all results replaces them, but XLA removes results from the barrier that
  nothing uses. So prefer one result, or results of which all are used.
  """

  def lower_call(ctx: Any, *operands: Any, **params: Any) -> list[Any]:
    module, ir = ctx.module_context, mlir.ir
    outs = [mlir.aval_to_ir_type(module, aval) for aval in ctx.avals_out]
    function = _func.FuncOp(
      "ep_op",
      ir.FunctionType.get([o.type for o in operands], outs),
      visibility="private",
      ip=ir.InsertionPoint.at_block_begin(module.module.body),
    )
    module.symbol_table.insert(function)
    block = function.add_entry_block()
    with ir.InsertionPoint(block):
      _func.ReturnOp(list(lower(ctx, *block.arguments, **params)))
    call = _func.CallOp(function, list(operands))
    notes = dict(_xla_stream_annotation="collective", inlineable="false")
    call.operation.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(
      {name: ir.StringAttr.get(value) for name, value in notes.items()}
    )
    if len(outs) == 1:
      return list(call.results)
    return list(_hlo.OptimizationBarrierOp(call.results).results)

  return lower_call


def module_note(
  ctx: LoweringContext, key: str, make: Callable[[str], str]
) -> str:
  """Returns the attribute "ep.<key>" of the lowered module.

  An attribute that is not set becomes `make(name)`, where `name` is the
  module's name, like "jit_step". An object in `ModuleContext.keepalives` would
  live as long, but JAX cannot export a module with such objects.
  """
  attributes = ctx.module_context.module.operation.attributes
  note = f"ep.{key}"
  if note not in attributes:
    name = mlir.ir.StringAttr(attributes["sym_name"]).value
    attributes[note] = mlir.ir.StringAttr.get(make(name))
  return str(mlir.ir.StringAttr(attributes[note]).value)


def distributed_client() -> Any:
  """Returns the key-value service of `jax.distributed`, or None."""
  return _distributed.global_state.client


def distributed_process() -> int:
  """Returns `jax.process_index()`, without initializing the devices."""
  return _distributed.global_state.process_id


def distributed_count() -> int:
  """Returns `jax.process_count()`, without initializing the devices."""
  return _distributed.global_state.num_processes or 1


def own_address() -> str | None:
  """Returns this host's address in the network of the coordinator, or None."""
  name, _, port = (
    _distributed.global_state.coordinator_address or ""
  ).rpartition(":")
  try:
    family, *_, address = socket.getaddrinfo(
      name.strip("[]"), port, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
      probe.connect(address)  # UDP: sends nothing
      return str(probe.getsockname()[0])
  except OSError:  # the coordinator's address is no host and port
    return None


def bind_cpu_collectives() -> None:
  """Binds XLA's CPU collectives to an address that other hosts reach.

  By default Gloo binds to the address of the host's name. If this is 127.0.0.1,
  as on many hosts, no other host reaches it. If the name has no address, JAX
  has no CPUs. In both cases, Gloo gets the address of the interface that
  reaches the coordinator. Workaround (seen in jax 0.12.0): JAX has no public
  option for this.
  """
  if jax.config.values["jax_cpu_collectives_implementation"] != "gloo":
    return
  own = own_address()
  if own is None or _gloo_has_an_address(own):
    return
  client = distributed_client()

  def make_client() -> Any:
    gloo = _jax.make_gloo_tcp_collectives(client, hostname=own)
    return _xla_bridge.make_cpu_client(gloo)

  _xla_bridge.register_backend_factory(
    "cpu", make_client, priority=0, fail_quietly=False
  )


def _gloo_has_an_address(own: str) -> bool:
  """Returns whether the address of the host's name is like `own`, or better."""
  try:
    of_name = socket.getaddrinfo(socket.gethostname(), None)[0][4][0]
  except OSError:
    return False
  is_loopback = ipaddress.ip_address(of_name).is_loopback
  return not is_loopback or ipaddress.ip_address(own).is_loopback


def cluster_process_count() -> int | None:
  """Returns the number of processes of the cluster that JAX detects, or None.

  `jax.distributed.initialize` asks the same cluster for missing arguments.
  Workaround (seen in jax 0.12.0): a Kubernetes pod outside of an indexed job is
  ignored, because JAX takes it for a part of one, and fails.
  """
  for cluster in _clusters.ClusterEnv._cluster_types:
    if cluster.opt_in_only_method:
      continue
    is_pod = cluster is _clusters.K8sCluster
    if is_pod and "JOB_COMPLETION_INDEX" not in os.environ:
      continue
    if cluster.is_env_present():
      return cluster.get_process_count()
  return None
