# SPDX-License-Identifier: Apache-2.0
"""Compares the ops under test with the oracle.

A `Case` is a layer and a routing for it. A test names a function of ops, and
`check` runs the function twice: on the ops under test, jitted over the case's
mesh, and on the oracle. All leaves of the two results must have the same bits:

    case = Case(layer(top_k=2), "skewed")
    case.check(dispatch, case.tokens(), case.weights())

All arrays are NumPy arrays in the global view, equal on every process. The
leading axis of tokens is split over the ranks. Received rows have a leading
axis with one entry per rank.

Several cases can share one program: `lower`, `run` and `check` take any number
of claims. A claim is a tuple `(case, fn, *arrays)`.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np

from conftest import assert_shards_close, assert_shards_equal, to_global
import ep
from ep.testing import _numbers
from ep.testing._routings import ROUTINGS
from groups import GPU, group, H, ranks, spec, T, within_limits
from op_functions import LocalOps, Moved, Ops, round_trip
from oracle import Differentiated, make_oracle
import quick_compiler


class Case:
  """A layer, a routing for it, and a source of arrays that fit both.

  Args:
    routing: a name in ROUTINGS, or an array of expert ids.
    lead: shape of one rank's tokens, without the hidden size.
    hidden: the hidden size.
    whole: whether to draw small positive whole numbers, which float32
      multiplies and adds exactly in any order. Needed for sums whose order the
      contract leaves open. The default, normal floats, shows every change in
      order and rounding.
    specials: whether to draw also zeros, denormals, infinities and NaNs of both
      signs.
    routing_weights: weights for `ep_prepare`, in the shape of the routing.
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
    routing_weights=None,
  ):
    self.layer = layer
    self._hidden = hidden
    self._lead = (ranks(layer) * lead[0], *lead[1:])
    self._received = (ranks(layer), layer.capacity_for(math.prod(lead)))
    self.whole = whole
    self._specials = specials
    self._rng = np.random.default_rng(0)
    if isinstance(routing, str):
      n = math.prod(self._lead)
      experts = layer.group.num_experts
      idx = ROUTINGS[routing](self._rng, (n, layer.top_k), experts)
      routing = idx.reshape(*self._lead, -1).astype(np.int32)
    self.topk_idx = routing
    self._routing_weights = routing_weights

  @property
  def routing(self):
    """Returns the arguments that `ep_prepare` takes besides the layer."""
    if self._routing_weights is None:
      return (self.topk_idx,)
    return self.topk_idx, self._routing_weights

  @functools.cached_property
  def oracle(self):
    return make_oracle(self.layer, *self.routing)

  def tokens(self, dtype=jnp.float32):
    """Draws tokens `[R * T, H]`."""
    return self._numbers((*self._lead, self._hidden), dtype)

  def rows(self, dtype=jnp.float32):
    """Draws rows `[R, C, H]`, including the unused rows at the end."""
    return self._numbers((*self._received, self._hidden), dtype)

  def weights(self, dtype=jnp.float32):
    """Draws weights `[R * T, K]` that are distinct in each supported dtype."""
    shape = (*self._lead, self.layer.top_k)
    return self._distinct(shape).astype(dtype)

  def row_weights(self, dtype=jnp.float32):
    """Draws weights `[R, C]` that are distinct in float32."""
    return self._distinct(self._received).astype(dtype)

  def inputs(self, dtype=jnp.float32):
    """Returns arrays for `op_functions.everything`."""
    rows, row_weights = self.rows(dtype), self.row_weights()
    return self.tokens(dtype), self.weights(), rows, row_weights

  def put(self, array):
    """Returns a global array whose leading axis is split over the ranks."""
    return to_global(array, self.layer.group.mesh, spec(self.layer))

  def run(self, fn, *arrays, **view):
    """Returns `fn(Ops, *arrays)`, jitted."""
    (out,) = run((self, fn, *arrays), **view)
    return out

  def check(self, fn, *arrays, **view):
    """Checks that `run` equals `fn(Oracle, *arrays)`, bit for bit."""
    check((self, fn, *arrays), **view)

  def check_round_trip(self):
    self.check(round_trip, self.tokens(), self.weights())

  def errors(self, fn, *arrays):
    """Returns a dict from each local rank to its error message, "" if none."""
    shards = self.put(np.arange(ranks(self.layer))).addressable_shards
    errors = {shard.index[0].start: "" for shard in shards}
    try:
      leaves = jax.tree.leaves(self.run(fn, *arrays))
      self.layer.group.raise_failures()
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
    """Checks that `run` fails on every rank, with all words in the error."""
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
    """Replaces some numbers by special values, if the case has `specials`."""
    return _numbers.with_specials(self._rng, rows) if self._specials else rows


def large_case(routing, mesh="ep4"):
  """Returns a case whose rows span many cache lines, chunks and pages."""
  lead, hidden = (64,), 2504
  wide = group(mesh, max_tokens_per_rank=lead[0], hidden_dim=hidden)
  return Case(ep.EpLayerConfig(wide), routing, lead=lead, hidden=hidden)


def global_view(layer, fn):
  def call(routing, *arrays):
    return fn(Ops(_prepare(layer, routing)), *arrays)

  return call


def _prepare(layer, routing):
  """Calls `ep_prepare` with `routing`: expert ids, or a tuple of arguments."""
  routing = routing if isinstance(routing, tuple) else (routing,)
  return ep.ep_prepare(layer, *routing)


def run_on(mesh, case, fn, *arrays):
  """Runs `fn` in a `shard_map` over `mesh` instead of the group's mesh."""
  sharded = spec(case.layer)
  program = jax.jit(
    jax.shard_map(
      global_view(case.layer, fn),
      mesh=mesh,
      in_specs=sharded,
      out_specs=sharded,
    )
  )
  args = case.routing, *arrays
  return program(*jax.tree.map(lambda x: to_global(x, mesh, sharded), args))


def local_view(layer, fn, *, check_vma=True):
  def call(routing, *arrays):
    return fn(LocalOps(_prepare(layer, routing)), *arrays)

  return jax.shard_map(
    call,
    mesh=layer.group.mesh,
    in_specs=spec(layer),
    out_specs=spec(layer),
    check_vma=check_vma,
  )


@functools.cache
def _program(parts, view, optimized):
  calls = [view(layer, fn) for layer, fn in parts]
  return jax.jit(
    lambda *args: [call(*a) for call, a in zip(calls, args, strict=True)],
    compiler_options=quick_compiler.OPTIMIZED if optimized else None,
  )


def lower(*claims, view=global_view, platforms=None):
  """Lowers one program that computes all claims."""
  program, args = _program_and_args(claims, view)
  return program.trace(*args).lower(lowering_platforms=platforms)


def exchanges(compiled):
  """Returns the sorted names of ep's exchanges in a compiled program."""
  # ep_unwritten and ep_retyped make buffers; other custom calls exchange rows.
  call = r'custom_call_target="(?!ep_unwritten|ep_retyped)'
  # backend="xla" exchanges counts, or rows [P, n, H], by XLA's collectives.
  counts = r' all-gather\(.*op_name="[^"]*/(?=ep_prepare\[)'
  rows = r',\d+,\d+\]\S* all-to-all\(.*op_name="[^"]*/(?=ep_\w+\[)'
  pattern = rf"(?:{call}|{counts}|{rows})(ep_\w+)"
  return sorted(re.findall(pattern, compiled.as_text()))


def run(*claims, view=global_view, optimized=False):
  """Runs one program that computes all claims.

  With `optimized`, XLA optimizes the code even if conftest.py turns that off.
  """
  program, args = _program_and_args(claims, view, optimized)
  with within_limits():
    return program(*args)


def _program_and_args(claims, view, optimized=False):
  parts = tuple((case.layer, fn) for case, fn, *_ in claims)
  args = [
    jax.tree.map(case.put, [case.routing, *arrays])
    for case, _, *arrays in claims
  ]
  return _program(parts, view, optimized), args


def check(*claims, view=global_view):
  """Checks all claims against the oracle, in one program."""
  for claim, actual in zip(claims, run(*claims, view=view), strict=True):
    assert_same(actual, expected(*claim))


def expected(case, fn, *arrays):
  """Returns `fn(Oracle, *arrays)`; derivatives need a case of whole numbers."""
  try:
    with np.errstate(all="ignore"):
      return fn(case.oracle, *arrays)
  except Differentiated:
    assert case.whole
    return jit_quickly(fn)(case.oracle, *arrays)


@functools.partial(jax.jit, static_argnums=0)
def _rounded(wire, rows):
  return ep.quant.dequantize(*ep.quant.quantize(rows, wire), rows.dtype)


def rounded(wire, rows):
  """Returns the rows after a round trip through the fp8 transport `wire`."""
  return np.asarray(_rounded(wire, rows))


@functools.cache
def jit_quickly(fn):
  """Jits `fn` and compiles it quickly, for functions that run once or twice."""
  return jax.jit(fn, compiler_options={} if GPU else quick_compiler.QUICK)


def assert_same(actual, expected):
  """Checks that two trees of arrays have the same structure, dtypes and bits.

  Any two NaNs are equal, except in `Moved` arrays. On GPUs, floats outside
  `Moved` arrays may differ by the rounding errors of a sum.
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
