# SPDX-License-Identifier: Apache-2.0
"""What the op tests share: routings, arrays, and the oracle beside the ops.

A `Case` is a layer and a routing for it. A test states one claim about a
function of ops, and `check` runs it twice: on the ops under test, jitted over
the case's mesh, and on the oracle, op by op. All leaves of the two results must
have the same bits:

    case = Case(layer(top_k=2), "skewed")
    case.check(dispatch, case.tokens(), case.weights())

All arrays are the global view's: the leading axis of tokens is split over the
ranks, and received rows have a leading axis of one entry per rank. They are
numpy arrays, drawn alike on every process.
"""

import contextlib
import dataclasses
import functools
import math
import os
import re

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
import numpy as np
import pytest

from conftest import (
  assert_shards_close,
  assert_shards_equal,
  make_mesh,
  TIMEOUT_S,
  to_global,
)
import ep
from ep._src import reference

# Of the ops under test; None is the platform's own.
BACKEND = os.environ.get("EP_TEST_BACKEND")

# Where the numbers differ from the contract by rounding, sizes have limits, and
# errors come later (docs/gpu.md).
GPU = jax.default_backend() == "gpu"

# Tokens of a rank, hidden size, experts, choices.
T, H, E, K = 5, 8 if GPU else 7, 8, 3


def not_with_xla(reason):
  """Marks a test of what backend="xla" does not promise."""
  return pytest.mark.skipif(BACKEND == "xla", reason=f"xla: {reason}")


MESHES = {
  "ep4": {"ep": 4},
  "ep2": {"ep": 2},
  "dp2_ep2": {"dp": 2, "ep": 2},
  "dp4_ep1": {"dp": 4, "ep": 1},
  "ep2_dp2": {"ep": 2, "dp": 2},
}


def bootstrap(mesh, **overrides):
  """A new group of the sizes above, to be closed by the caller."""
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
  """Skips, with its words, what the backend of GPUs says that it cannot do."""
  try:
    yield
  except ValueError as e:
    if GPU and ("NCCL EP's limit" in str(e) or 'backend = "nccl"' in str(e)):
      pytest.skip(str(e))
    raise


@contextlib.contextmanager
def failing(group):
  """Expects that ops of the group fail in here. Yields what pytest knows."""
  with pytest.raises(ep.EpError) as error:
    yield error
    group.check()


@functools.cache
def group(mesh="ep4", axis_type=AxisType.Auto, **options):
  """A group that tests share; it lives as long as the process."""
  axes = MESHES[mesh]
  with within_limits():
    return bootstrap(make_mesh(axes, (axis_type,) * len(axes)), **options)


def large_case(routing, mesh="ep4"):
  """Rows of many cache lines, in many chunks, and in several pages."""
  lead, hidden = (64,), 2504
  wide = group(mesh, max_tokens_per_rank=lead[0], hidden_dim=hidden)
  return Case(ep.EpLayerConfig(wide), routing, lead=lead, hidden=hidden)


def layer(mesh="ep4", axis_type=AxisType.Auto, **options):
  """A layer of a shared group.

  On GPUs the layers of a group have one capacity, so there the layer's sizes
  are its group's, too.
  """
  sizes = ("alignment", "recv_capacity_per_rank", "top_k") if GPU else ()
  shared = {k: options[k] for k in sizes if k in options}
  return ep.EpLayerConfig(group(mesh, axis_type, **shared), **options)


# --- Routings: [N, K] distinct experts of each of N tokens, or -1 -----------


def draw(rng, shape, odds=(1,) * E):
  """Distinct experts, likelier ones by their odds (Gumbel's top-k trick)."""
  n, k = shape
  odds = np.asarray(odds, float)
  with np.errstate(divide="ignore"):
    keys = np.log(odds) + rng.gumbel(size=(n, odds.size))
  idx = keys.argsort(-1)[:, ::-1][:, :k]
  return np.where(odds[idx] > 0, idx, -1).astype(np.int32)


def _uniform(rng, shape):
  return draw(rng, shape)


def _skewed(rng, shape):
  return draw(rng, shape, 2.0 ** -np.arange(E))


def _empty_experts(rng, shape):
  return draw(rng, shape, np.arange(E) % 2)


def _to_one_expert(rng, shape):
  return draw(rng, shape, np.arange(E) == E - 2)


def _with_unused_choices(rng, shape):
  return np.where(rng.random(shape) < 0.4, -1, draw(rng, shape))


def _one_token(rng, shape):
  only = np.arange(shape[0])[:, None] == shape[0] // 2
  return np.where(only, draw(rng, shape), -1)


def _idle_rank(rng, shape):
  """The second quarter, which is one rank's tokens, goes nowhere."""
  quarter = np.arange(shape[0])[:, None] * 4 // shape[0]
  return np.where(quarter == 1, -1, draw(rng, shape))


def _idle(rng, shape):
  return np.full(shape, -1)


ROUTINGS = {
  "uniform": _uniform,
  "skewed": _skewed,
  "empty_experts": _empty_experts,
  "to_one_expert": _to_one_expert,
  "with_unused_choices": _with_unused_choices,
  "one_token": _one_token,
  "idle_rank": _idle_rank,
  "idle": _idle,
}


# --- The ops, and the oracle with the same methods ---------------------------


class Ops:
  """The ops under test, bound to a handle."""

  def __init__(self, handle):
    self.handle = handle

  def sizes(self):
    h = self.handle
    return h.group_sizes, h.token_counts, h.total_recv_tokens

  def dispatch(self, tokens, weights):
    return ep.ep_dispatch(self.handle, tokens, weights)

  def combine(self, rows, weights=None):
    return ep.ep_combine(self.handle, rows, weights)

  def dispatch_bwd(self, primals, cotangents):
    return jax.vjp(self.dispatch, *primals)[1](cotangents)

  def combine_bwd(self, primals, cotangent):
    return jax.vjp(self.combine, *primals)[1](cotangent)


class LocalOps(Ops):
  """The ops of one rank, inside `shard_map`, in the global view's shapes."""

  def sizes(self):
    return jax.tree.map(lambda x: x[None], super().sizes())

  def dispatch(self, tokens, weights):
    return jax.tree.map(lambda x: x[None], super().dispatch(tokens, weights))

  def combine(self, rows, weights=None):
    return super().combine(*jax.tree.map(lambda x: x[0], (rows, weights)))


class Differentiated(Exception):
  """NumPy arrays were wanted, and JAX traces."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Oracle:
  """Has the methods of `Ops`, by the reference on each EP domain.

  Of NumPy arrays unless it is traced itself, as an argument of a jitted
  function; then functions of it can be differentiated.
  """

  routings: tuple[reference.Routing, ...]  # of each domain
  capacity: int = dataclasses.field(metadata=dict(static=True))
  lead: tuple[int, ...] = dataclasses.field(metadata=dict(static=True))

  def sizes(self):
    return self._map(
      lambda r: (r.group_sizes, r.token_counts, r.total_recv_tokens), "->rrr"
    )

  def dispatch(self, tokens, weights):
    call = functools.partial(reference.dispatch, capacity=self.capacity)
    return self._map(call, "tt->rr", tokens, weights)

  def combine(self, rows, weights=None):
    arrays = (rows,) if weights is None else (rows, weights)
    return self._map(
      lambda *x: (reference.combine(*x),), "r" * len(arrays) + "->t", *arrays
    )[0]

  def dispatch_bwd(self, primals, cotangents):
    _, weights = primals
    g_tokens, g_weights = self._map(
      reference.dispatch_bwd, "rr->tt", *cotangents
    )
    return g_tokens, g_weights.astype(weights.dtype)

  def combine_bwd(self, primals, cotangent):
    call = functools.partial(reference.combine_bwd, capacity=self.capacity)
    (g,) = self._map(lambda *x: (call(*x),), "t->r", cotangent)
    if len(primals) == 1:
      return (g,)
    rows, weights = (x.astype(np.float32) for x in primals)
    g = g.astype(np.float32)
    grads = g * weights[..., None], (g * rows).sum(-1)
    return tuple(d.astype(x.dtype) for d, x in zip(grads, primals, strict=True))

  def _map(self, fn, kinds, *arrays):
    """`fn(routing, *arrays)` for the arrays of each domain.

    `kinds`, as "tt->rr", has a letter for each array and result of the global
    view: tokens `[R * T, ...]` or rows `[R, ...]`.
    """
    traced = isinstance(self.routings[0].slot, jax.core.Tracer)
    if not traced and any(isinstance(x, jax.core.Tracer) for x in arrays):
      raise Differentiated
    xp = jnp if traced else np
    domains, ranks = len(self.routings), len(self.routings[0].slot)
    split = {
      "t": lambda x: x.reshape(domains, ranks, -1, x.shape[-1]),
      "r": lambda x: x.reshape(domains, ranks, *x.shape[1:]),
    }
    join = {
      "t": lambda x: x.reshape(*self.lead, x.shape[-1]),
      "r": lambda x: x.reshape(-1, *x.shape[2:]),
    }
    kinds_in, kinds_out = kinds.split("->")
    arrays = [
      split[k](xp.asarray(x)) for k, x in zip(kinds_in, arrays, strict=True)
    ]
    outs = [fn(*x) for x in zip(self.routings, *arrays, strict=True)]
    return tuple(
      join[k](xp.stack(x))
      for k, x in zip(kinds_out, zip(*outs, strict=True), strict=True)
    )


def make_oracle(layer, topk_idx):
  domains = ranks(layer) // layer.ep_size
  routings = [
    reference.prepare(
      x,
      num_experts=layer.group.num_experts,
      capacity=layer.capacity,
      alignment=layer.alignment,
    )
    for x in topk_idx.reshape(domains, layer.ep_size, -1, layer.top_k)
  ]
  return Oracle(tuple(routings), layer.capacity, topk_idx.shape[:-1])


def sizes(ops):
  return ops.sizes()


def dispatch(ops, tokens, weights):
  return ops.dispatch(tokens, weights)


def combine(ops, rows, weights=None):
  return ops.combine(rows, weights)


def there_and_back(ops, tokens, weights):
  return ops.combine(*ops.dispatch(tokens, weights))


def block(ops, tokens, weights, *_):
  recv, recv_weights = ops.dispatch(tokens, weights)
  return ops.combine(recv * recv, recv_weights)


def block_and_back(ops, tokens, weights, g):
  out, vjp = jax.vjp(lambda *x: block(ops, *x), tokens, weights)
  return out, vjp(g)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Moved:
  """Arrays whose elements are only moved, so that NaNs keep their bits."""

  arrays: tuple[jax.Array, ...]


def everything(ops, tokens, weights, rows, row_weights):
  """Every op, each on inputs of its own."""
  g_tokens, g_weights = ops.dispatch_bwd((tokens, weights), (rows, row_weights))
  return dict(
    sizes=ops.sizes(),
    dispatch=Moved(ops.dispatch(tokens, weights)),
    combine=ops.combine(rows),
    weighted=ops.combine(rows, row_weights),
    dispatch_bwd=(g_tokens, Moved((g_weights,))),
    combine_bwd=Moved(ops.combine_bwd((rows,), tokens)),
  )


# --- Cases -------------------------------------------------------------------


class Case:
  """A layer, a routing for it, and arrays that fit.

  Args:
    routing: a name in ROUTINGS, or the choices themselves.
    lead: shape of one rank's tokens, without the hidden size.
    hidden: the hidden size.
    whole: draw small positive whole numbers, which float32 multiplies and adds
      exactly in any order, for sums whose order the contract leaves open. The
      default, normal floats, shows every change in order and rounding.
    specials: have zeros of both signs, denormals, infinities and NaNs of both
      kinds among the numbers.
  """

  def __init__(
    self,
    layer,
    routing="uniform",
    *,
    lead=(T,),
    hidden=H,
    whole=False,
    specials=False,
  ):
    self.layer = layer
    self._hidden = hidden
    self._lead = (ranks(layer) * lead[0], *lead[1:])
    self._received = (ranks(layer), layer.capacity)
    self.whole = whole
    self._specials = specials
    self._rng = np.random.default_rng(0)
    if isinstance(routing, str):
      n = math.prod(self._lead)
      idx = ROUTINGS[routing](self._rng, (n, layer.top_k))
      routing = idx.reshape(*self._lead, -1).astype(np.int32)
    self.topk_idx = routing

  @functools.cached_property
  def oracle(self):
    return make_oracle(self.layer, self.topk_idx)

  def tokens(self, dtype=jnp.float32):
    """`[R * T, H]`."""
    return self._numbers((*self._lead, self._hidden), dtype)

  def rows(self, dtype=jnp.float32):
    """`[R, C, H]`, with numbers in the rows that nobody owns, too."""
    return self._numbers((*self._received, self._hidden), dtype)

  def weights(self, dtype=jnp.float32):
    """`[R * T, K]`; no two are equal, in any of our dtypes."""
    shape = (*self._lead, self.layer.top_k)
    return self._distinct(shape).astype(dtype)

  def row_weights(self, dtype=jnp.float32):
    """`[R, C]`; no two are equal in float32."""
    return self._distinct(self._received).astype(dtype)

  def inputs(self, dtype=jnp.float32):
    """What `everything` takes."""
    rows, row_weights = self.rows(dtype), self.row_weights()
    return self.tokens(dtype), self.weights(), rows, row_weights

  def put(self, array):
    """A global array, its leading axis split over the ranks."""
    return to_global(array, self.layer.group.mesh, spec(self.layer))

  def run(self, fn, *arrays, **view):
    """`fn(Ops, *arrays)`, jitted."""
    (out,) = run((self, fn, *arrays), **view)
    return out

  def check(self, fn, *arrays, **view):
    """`run` equals `fn(Oracle, *arrays)`, bit for bit."""
    check((self, fn, *arrays), **view)

  def errors(self, fn, *arrays):
    """What `run` fails with on each rank of this process; "" if it does not."""
    shards = self.put(np.arange(ranks(self.layer))).addressable_shards
    errors = {shard.index[0].start: "" for shard in shards}
    try:
      leaves = jax.tree.leaves(self.run(fn, *arrays))
      self.layer.group.check()
    except ep.EpError as error:
      return dict.fromkeys(errors, str(error))
    for leaf in leaves:
      for rank, shard in zip(errors, leaf.addressable_shards, strict=True):
        try:
          shard.data.block_until_ready()
        except ep.EpError as error:
          errors[rank] = str(error)
    return errors

  def check_error(self, words, fn, *arrays):
    """`run` fails on every rank, with all these words."""
    for error in self.errors(fn, *arrays).values():
      for word in words:
        assert word in error

  def _numbers(self, shape, dtype):
    if self.whole:
      return self._rng.integers(1, 5, shape).astype(dtype)
    return self._with_specials(self._rng.standard_normal(shape).astype(dtype))

  def _distinct(self, shape):
    numbers = 1 + self._rng.permutation(math.prod(shape)).reshape(shape)
    numbers = (numbers / 64).astype(np.float32)
    return self._with_specials(numbers[..., None])[..., 0]

  def _with_specials(self, rows):
    """Puts special values into half of the rows, if they are wanted.

    A quarter of the rows has nothing but zeros and numbers around the smallest
    normal one, since the sums of all others are soon infinite or NaN.
    """
    if not self._specials:
      return rows
    values = special_values(rows.dtype)
    small = values[np.abs(values) < 1e-3]
    kind = self._rng.integers(4, size=(*rows.shape[:-1], 1))
    mixed = np.where(
      self._rng.random(rows.shape) < 0.5,
      self._rng.choice(values.view(f"u{values.itemsize}"), rows.shape),
      _bits(rows),
    )
    smalls = self._rng.choice(small.view(mixed.dtype), rows.shape)
    bits = np.where(kind == 0, smalls, np.where(kind == 1, mixed, _bits(rows)))
    return bits.view(rows.dtype)


def _bits(x):
  return x.view(f"u{x.dtype.itemsize}")


def special_values(dtype):
  """Numbers of the dtype that a machine may treat like no others."""
  infinity, least_normal, one = (
    int(np.array(x, dtype).view(f"u{dtype.itemsize}"))
    for x in (np.inf, jnp.finfo(dtype).tiny, 1)
  )
  quiet = least_normal >> 1  # the first bit of the mantissa
  magnitudes = [0, 1, 5, least_normal - 1, least_normal, least_normal + 1]
  magnitudes += [2 * least_normal + 1, one, infinity - 1, infinity]
  magnitudes += [infinity + 1, infinity + quiet - 1, infinity + quiet + 1]
  sign = 1 << (8 * dtype.itemsize - 1)
  bits = [x + s for s in (0, sign) for x in magnitudes]
  return np.array(bits, f"u{dtype.itemsize}").view(dtype)


def ranks(layer):
  """How many ranks hold distinct tokens."""
  shape = layer.group.mesh.shape
  return math.prod(shape[axis] for axis in _axes(layer))


def _axes(layer):
  return (*layer.group.data_axes, layer.group.axis_name)


def spec(layer):
  return PartitionSpec(_axes(layer))


def global_view(layer, fn):
  def call(topk_idx, *arrays):
    return fn(Ops(ep.ep_prepare(layer, topk_idx)), *arrays)

  return call


def run_on(mesh, case, fn, *arrays):
  """`fn` of the ops in a `shard_map` over `mesh`, whatever the group's is."""

  def call(topk_idx, *arrays):
    return fn(Ops(ep.ep_prepare(case.layer, topk_idx)), *arrays)

  sharded = spec(case.layer)
  program = jax.jit(
    jax.shard_map(call, mesh=mesh, in_specs=sharded, out_specs=sharded)
  )
  return program(
    *(to_global(x, mesh, sharded) for x in (case.topk_idx, *arrays))
  )


def local_view(layer, fn, *, check_vma=True, out_specs=None):
  def call(topk_idx, *arrays):
    return fn(LocalOps(ep.ep_prepare(layer, topk_idx)), *arrays)

  return jax.shard_map(
    call,
    mesh=layer.group.mesh,
    in_specs=spec(layer),
    out_specs=out_specs or spec(layer),
    check_vma=check_vma,
  )


_OPTIMIZED = {
  "xla_backend_optimization_level": 3,
  "xla_cpu_use_fusion_emitters": True,
}


@functools.cache
def _program(parts, view, optimized):
  calls = [view(layer, fn) for layer, fn in parts]
  return jax.jit(
    lambda *args: [call(*a) for call, a in zip(calls, args, strict=True)],
    compiler_options=_OPTIMIZED if optimized else None,
  )


def lower(*claims, view=global_view, platforms=None):
  """One program of all claims, `(case, fn, *arrays)`, lowered."""
  program, args = _program_and_args(claims, view)
  return program.trace(*args).lower(lowering_platforms=platforms)


def exchanges(compiled):
  """Names of our exchanges in a compiled program, sorted."""
  if BACKEND == "xla":  # collectives of counts, or of rows [P, n, H]
    row = r" all-gather\(|,\d+,\d+\]\S* all-to-all\("
    pattern = rf'(?:{row}).*op_name="[^"]*/(ep_\w+)\['
  else:
    pattern = r'custom_call_target="(ep_\w+)"'
  return sorted(re.findall(pattern, compiled.as_text()))


def run(*claims, view=global_view, optimized=False):
  """Returns what one program of all claims, `(case, fn, *arrays)`, returns.

  `optimized` code is what users get, also where conftest.py has XLA compile
  quickly.
  """
  program, args = _program_and_args(claims, view, optimized)
  with within_limits():
    return program(*args)


def _program_and_args(claims, view, optimized=False):
  parts = tuple((case.layer, fn) for case, fn, *_ in claims)
  args = [
    [case.put(x) for x in (case.topk_idx, *arrays)]
    for case, _, *arrays in claims
  ]
  return _program(parts, view, optimized), args


def check(*claims, view=global_view):
  """Each claim, `(case, fn, *arrays)`, holds where all are one program."""
  for claim, actual in zip(claims, run(*claims, view=view), strict=True):
    assert_same(actual, expected(*claim))


def expected(case, fn, *arrays):
  """`fn(Oracle, *arrays)`, whose derivatives have to be of whole numbers."""
  try:
    with np.errstate(all="ignore"):
      return fn(case.oracle, *arrays)
  except Differentiated:
    assert case.whole
    return _compiled(fn)(case.oracle, *arrays)


@functools.cache
def _compiled(fn):
  """Compiled in half the time, to be run once or twice."""
  return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0})


def assert_same(actual, expected):
  """Two trees of arrays have the same structure, shapes, dtypes and bits.

  A NaN equals any NaN, unless it was only moved. On GPUs, other floats may
  differ by the roundings of a sum.
  """
  jax.tree.map(
    _assert_same_leaf, actual, expected, is_leaf=lambda x: isinstance(x, Moved)
  )


def _assert_same_leaf(actual, expected):
  if isinstance(actual, Moved):
    exactly = functools.partial(assert_shards_equal, nan_bits=True)
    jax.tree.map(exactly, actual, expected)
  elif GPU:
    _assert_near(actual, expected)
  else:
    assert_shards_equal(actual, expected)


def _assert_near(actual, expected):
  exact = not jnp.issubdtype(actual.dtype, jnp.floating)
  eps = 0 if exact else float(jnp.finfo(actual.dtype).eps)
  assert actual.dtype == np.asarray(expected).dtype
  assert_shards_close(actual, expected, rtol=8 * eps, atol=32 * eps)
