# SPDX-License-Identifier: Apache-2.0
"""The table of the layer: each option works in each way to use the layer.

A row of `ROWS` is a layer with some options. Each test is a column: a way to
use the layer. All results equal a dense layer in float64. A new option
joins a row, or is a new row.
"""

import contextlib
import dataclasses
import functools
import inspect

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from cases import jit_quickly
from conftest import to_global
import ep
from groups import BACKEND, GPU, not_with_xla, of_one_process
from layer_steps import whole
from layer_table import (
  data_of,
  expected,
  kept_choices,
  loss_of,
  LOSSES,
  results_of,
  ROWS,
  Setup,
)

NARROW = jnp.bfloat16


def test_every_option_has_a_row():
  options = {f.name for f in dataclasses.fields(ep.MoEConfig)}
  options |= {*inspect.signature(ep.MoE.__call__).parameters}
  sizes = {"hidden", "inner", "top_k", "name", "self", "params", "x"}
  columns = {"mask"}
  rows = {n for row in ROWS.values() for n in row.options}
  rows |= {row.ids for row in ROWS.values()}
  rows |= {"state", "placement", "pad"}  # has_state, is_placed, pad
  assert options - sizes - columns == rows - {None}


def check(row, got, want, what, tolerance=None):
  tolerance = tolerance or ROWS[row].tolerance

  def of_leaf(path, a, b):
    limit = tolerance * max(np.abs(b).max(), 1e-3)
    name = what + jax.tree_util.keystr(path)
    np.testing.assert_allclose(np.float64(a), b, tolerance, limit, err_msg=name)

  jax.tree.map_with_path(of_leaf, got, want)


def check_metrics(row, got, want):
  check(row, {n: got[n] for n in want}, want, "metrics", 2e-5)


def check_all(row, got, want):
  y, metrics, grads, grad_x = got
  check_metrics(row, metrics, want[1])
  check(row, (y, grads, grad_x), (want[0], *want[2:]), "")


# The programs. Several tests check the results of one program.


def program_of(setup, view):
  """Returns a function of arrays to y, metrics and gradients.

  `view` is also "vmap": the global view of each example, along axis 1.
  """
  axes, share = setup.group.token_axes, 1
  if view == "local":
    share = 1 / setup.group.num_token_ranks

  def step(params, x, ct, mask, ids, placement):
    def fn(params, x):
      if view != "vmap":
        return setup(params, x, mask, ids, placement)
      return jax.vmap(
        lambda x, ids: setup(params, x, None, ids, placement), 1, (1, None)
      )(x, ids)

    return results_of(fn, params, x, ct, share)

  if view == "local":
    arrays = setup.specs, P(axes)
    metrics = {} if setup.row.network else P()
    step = jax.shard_map(
      step,
      mesh=setup.group.mesh,
      in_specs=(*arrays, *[P(axes)] * 3, P()),
      out_specs=(P(axes), metrics, *arrays),
    )
  return step


@functools.cache
def step(row, view="global", mesh="ep4", **changes):
  """Returns a function of `Data` to y, metrics and gradients."""
  setup = Setup(row, mesh, **changes)
  program = jit_quickly(program_of(setup, view))

  def run(data, mask=None):
    placement = setup.placement()
    args = setup.put(data, placement, mask, replicated=view == "vmap")
    y, metrics, grads, grad_x = whole(program(*args, placement))
    return y, metrics, setup.by_expert(grads, placement), grad_x

  return run


@functools.cache
def first(row):
  """Returns the results of the first program, and of the dense layer."""
  data = data_of(row)
  return step(row)(data, data.mask), expected(row, data)


@contextlib.contextmanager
def strictly():
  modes = (
    jax.numpy_dtype_promotion("strict"),
    jax.numpy_rank_promotion("raise"),
    jax.enable_x64(True),
    jax.debug_nans(True),
  )
  with contextlib.ExitStack() as stack:
    for mode in modes:
      stack.enter_context(mode)
    yield


@functools.cache
def local(row, busy=False):
  """Returns a layer, data, and the results in the local view.

  The capacity fits even routings. JAX runs in its strict modes.
  """
  changes = dict(overflow="drop", capacity_factor=1.6)
  if row == "chunk":
    changes = {}
  if row == "deterministic":  # its capacity is a multiple of 128
    changes["capacity_factor"] = 1.0
  run = step(row, "local", "dp2_ep2", **changes)
  data = data_of(row, busy=busy, pad=False)
  with strictly():
    results = run(data)
  return Setup(row, "dp2_ep2", **changes), data, results


@functools.cache
def scan(row):
  """Returns what two stacked layers return, on Explicit axes, and their data.

  Both layers get the same tokens, and the loss is of the sum of their outputs.
  """
  setup = Setup(row, "dp2_ep2", AxisType.Explicit)
  datas = [data_of(row, seed) for seed in (1, 2)]
  placements = [setup.placement(seed) for seed in (1, 2)]

  def loss(params, x, ct, ids, placements):
    @jax.checkpoint
    def block(total, of_layer):
      params, placement = of_layer
      y, metrics = setup(params, x, None, ids, placement)
      return total + y.astype(x.dtype), (y, metrics)

    total, (ys, metrics) = lax.scan(block, x, (params, placements))
    terms = sum(LOSSES[n] * metrics[n].sum() for n in LOSSES if n in metrics)
    return ((total - x) * ct).sum() + terms, (ys, metrics)

  x, ct, _, ids = setup.put(datas[0], placements[0], None)[1:]
  stacked = [
    setup.in_slots(d.params, p) for d, p in zip(datas, placements, strict=True)
  ]
  params = {
    n: to_global(
      np.stack([p[n] for p in stacked]), setup.group.mesh, P(None, *s)
    )
    for n, s in setup.specs.items()
  }
  program = jit_quickly(jax.grad(loss, (0, 1), has_aux=True))
  stack = ep.Placement(np.stack([p.experts for p in placements]))
  with jax.set_mesh(setup.group.mesh):
    (grads, grad_x), aux = program(params, x, ct, ids, stack)
  types = jax.tree.map(jax.typeof, (aux[0], grad_x, grads))
  ys, metrics, grads, grad_x = whole((*aux, grads, grad_x))
  of_layers = []
  for i, placement in enumerate(placements):
    y, of_layer, of_params = jax.tree.map(
      lambda a, i=i: a[i], (ys, metrics, grads)
    )
    of_layers.append((y, of_layer, setup.by_expert(of_params, placement)))
  return types, of_layers, grad_x, [expected(row, d) for d in datas]


# These rows differ from others in the router or the experts, which are the same
# with backend="xla". XLA compiles slowly for it.
SAME_WITH_XLA = "plain", "early", "tp", "pad", "experts"


def columns(*without):
  """Marks a column of the table, for all rows but `without`."""
  if BACKEND == "xla":
    without = (*without, *SAME_WITH_XLA)
  elif GPU:  # nccl refuses deterministic layers
    without = (*without, "deterministic")
  rows = [r for r in ROWS if r not in without]
  return pytest.mark.parametrize("row", rows)


one_program = not_with_xla("compiles slowly, so only the first program runs")


@columns()
def test_forward(row):
  (y, metrics, *_), (want_y, want_metrics, *_) = first(row)
  check_metrics(row, metrics, want_metrics)
  check(row, y, want_y, "y")


@columns()
def test_gradients(row):
  got, want = first(row)
  check(row, got[2:], want[2:], "gradients")


@columns()
def test_masked_tokens_may_be_nan(row):
  """Masked tokens visit no expert and do not count."""
  data = data_of(row)
  mask = np.random.default_rng(3).random(data.mask.shape) < 0.6
  junk = np.resize(np.float32([np.nan, np.inf, 3e38]), data.x.shape)
  masked = dataclasses.replace(
    data, x=np.where(mask[..., None], data.x, junk), mask=mask
  )
  check_all(row, step(row)(masked, mask), expected(row, masked))


@one_program
@of_one_process
@columns()
def test_vmap_of_any_number_of_examples(row):
  """y and gradients equal a batch's; metrics are of all examples."""
  data = data_of(row)
  want = expected(row, data, balance="batch")
  check_all(row, step(row, "vmap")(data), want)


@one_program
@columns()
def test_scan_with_remat(row):
  _, of_layers, grad_x, wants = scan(row)
  for got, want in zip(of_layers, wants, strict=True):
    check_all(row, (*got, want[3]), want)
  check(row, grad_x, wants[0][3] + wants[1][3], "grad_x")


@one_program
@columns()
def test_explicit_axes(row):
  """y is sharded like the tokens, and gradients like the arguments."""
  (ys, grad_x, grads), *_ = scan(row)

  def check_axes(array, *axes):
    rest = [None] * (array.ndim - len(axes))
    assert array.sharding.spec == P(*axes, *rest)

  axes = () if ROWS[row].pad else ("dp",)
  check_axes(ys, None, *axes)
  check_axes(grad_x, *axes)
  for name, spec in Setup(row, "dp2_ep2").specs.items():
    check_axes(grads[name], None, *spec)


@one_program
@columns()
def test_local_view(row):
  _, data, results = local(row)
  check_all(row, results, expected(row, data))


@one_program
@columns()
def test_strict_modes(row):
  """The modes find no promotion, and x64 changes no dtype."""
  _, data, (y, metrics, *grads) = local(row)

  def dtypes(tree):
    return jax.tree.map(lambda a: a.dtype, tree)

  assert y.dtype == (ROWS[row].config.dtype or data.x.dtype)
  assert dtypes(grads) == dtypes([data.params, data.x])
  assert {a.itemsize for a in metrics.values()} <= {4}


@one_program
@columns()
def test_drops(row):
  """Dropped choices add nothing and have no gradient; chunks drop nothing."""
  setup, data, got = local(row, busy=True)
  kept = kept_choices(row, setup, data)
  if row == "chunk":
    tokens = data.mask.size // setup.group.num_token_ranks
    assert got[1]["max_rank_rows"] > setup.ep_layer.capacity_for(tokens)
    kept[:] = True
  assert kept.all() == (row == "chunk")
  check_all(row, got, expected(row, data, kept))


@one_program
@of_one_process
def test_each_domain_decides_whether_it_needs_chunks():
  """The first domain has four tokens, and the second one more than fit."""
  setup, data = Setup("chunk", "dp2_ep2"), data_of("chunk", busy=True)
  mask = data.mask.copy()
  mask[:4, 1:] = False
  data = dataclasses.replace(data, mask=mask)
  y, metrics, *grads = step("chunk", mesh="dp2_ep2")(data, data.mask)
  tokens = data.mask.size // setup.group.num_token_ranks
  assert metrics["max_rank_rows"] > setup.ep_layer.capacity_for(tokens)
  check_all("chunk", (y, metrics, *grads), expected("chunk", data))


@one_program
@of_one_process
@columns("deterministic")
def test_bfloat16(row):
  data, setup = data_of(row), Setup(row)
  params = {
    n: p if n.startswith("router") else np.asarray(p, NARROW)
    for n, p in data.params.items()
  }
  data = dataclasses.replace(data, params=params, x=data.x.astype(NARROW))
  placement = setup.placement()

  @jit_quickly
  def run(params, x, _, mask, ids):
    return setup(params, x, mask, ids, placement)

  y, metrics = whole(run(*setup.put(data, placement, None)))
  want_y, want_metrics, *_ = expected(row, data)
  assert y.dtype == NARROW
  check(row, y, want_y, "y", 3e-2)
  check_metrics(row, metrics, want_metrics)


@one_program
@of_one_process
@columns("chunk")
def test_tangents(row):
  """On one EP rank, the loss has the tangent that gradients on four give."""
  setup, data = Setup(row, "dp4_ep1"), data_of(row)
  placement, (_, (_, _, *grads)) = setup.placement(), first(row)

  @jit_quickly
  def run(params, x, ct, mask, ids):
    loss = loss_of(lambda p, x: setup(p, x, mask, ids, placement), ct)
    return jax.jvp(loss, (params, x), (params, x), has_aux=True)[1]

  tangent = whole(run(*setup.put(data, placement, None)))
  terms = jax.tree.map(lambda a, b: a * b, grads, [data.params, data.x])
  terms = np.concatenate([a.ravel() for a in jax.tree.leaves(terms)])
  limit = ROWS[row].tolerance * np.abs(terms).sum()
  np.testing.assert_allclose(tangent, terms.sum(), 0, limit)


# The refused pairs. refusals_test.py has others.


def linearized():
  setup, data = Setup("chunk"), data_of("chunk")
  params, x, _, mask, ids = setup.put(data, None, None)

  def fn(x):
    return setup(params, x, mask, ids, None)[0]

  jax.jit(lambda x: jax.linearize(fn, x)[1](x))(x)


def with_learned_slope():
  data = data_of("chunk")

  def loss(slope):
    setup = Setup("chunk", activation=lambda x: slope * x)
    return setup(data.params, data.x, None, None, None)[0].sum()

  jax.grad(loss)(1.0)


def without_vma():
  setup, data = Setup("tp"), data_of("tp")
  tokens = P(setup.group.token_axes)
  call = jax.shard_map(
    lambda params, x: setup(params, x, None, None, None)[0],
    mesh=setup.group.mesh,
    in_specs=(setup.specs, tokens),
    out_specs=tokens,
    check_vma=False,
  )
  jax.eval_shape(call, data.params, data.x)


@of_one_process
@pytest.mark.parametrize(
  "call, words",
  [
    (linearized, "can't apply forward-mode"),
    (with_learned_slope, '"moe".*closes over traced values'),
    (without_vma, "tp_axis = 'dp' needs a jax.shard_map with check"),
  ],
)
def test_refused(call, words):
  with pytest.raises((TypeError, ValueError), match=words):
    call()


@one_program
@of_one_process
def test_gradients_of_each_example():
  """`vmap(grad)` exchanges once per example, here with separate `w_up`."""
  setup, data = Setup("plain"), data_of("plain")
  params = data.params | {
    "w_up": np.stack([data.params["w_up"], data.params["w_up"] + 1])
  }
  axes = {n: 0 if n == "w_up" else None for n in params}

  def of_example(params, x):
    def fn(params, x):
      return setup(params, x, None, None, None)

    return results_of(fn, params, x, data.ct)

  x = np.stack([data.x, -data.x])
  got = jit_quickly(jax.vmap(of_example, (axes, 0)))(params, x)
  for i in range(2):
    one = dataclasses.replace(
      data, x=x[i], params=params | {"w_up": params["w_up"][i]}
    )
    of_one = jax.tree.map(lambda a, i=i: np.asarray(a[i]), got)
    check_all("plain", of_one, expected("plain", one))
