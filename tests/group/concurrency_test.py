# SPDX-License-Identifier: Apache-2.0
"""Exchanges that run at the same time do not mix or wait for each other.

Programs overlap, and several threads of a process launch programs.

XLA:CPU runs the ready ops of a program in any order. The order differs between
ranks, and programs overlap. Each program here would hang, or return rows of
another exchange, if the backend matched ops by their order of arrival or if a
handler waited.
"""

import concurrent.futures
import functools
import threading

import jax
from jax.experimental import io_callback
import jax.numpy as jnp
import numpy as np
import pytest

from cases import assert_same, Case, check, expected, local_view, run
from conftest import make_mesh, TIMEOUT_S
import ep
from groups import (
  BACKEND,
  bootstrap,
  GPU,
  layer,
  MESHES,
  not_with_xla,
)
from op_functions import block, block_and_back, Ops, round_trip

ROUTINGS = ["uniform", "skewed", "empty_experts", "with_unused_choices"]


def claim(routing="uniform", fn=block_and_back, scale=1, **options):
  """Returns a claim about `fn` for `cases.check`."""
  case = Case(layer(**options), routing, whole=True)
  tokens = case.tokens() * np.float32(scale)
  return case, fn, tokens, case.weights(), case.tokens()


def test_many_layers_of_two_groups(request):
  """In each of two groups, 12 layers dispatch and combine in any order."""
  claims = [
    claim(
      ROUTINGS[i % 4],
      block,
      1 + i % 8,
      mesh=mesh,
      name=f"{i}",
      top_k=1 + i % 3,
      alignment=1 + i % 4,
    )
    for i in range(12)
    for mesh in ("ep4", "dp2_ep2")
  ]
  want = [expected(*claim) for claim in claims]
  for _ in range(request.config.getoption("load_rounds")):
    assert_same(run(*claims), want)


def test_one_rank_runs_extra_programs():
  """Ranks need not launch unrelated programs equally often."""
  device = jax.devices()[1]
  extra = jax.jit(lambda x: x * 2)
  for _ in range(4):
    if device.process_index == jax.process_index():
      extra(jax.device_put(jnp.ones(3), device))
    check(claim("skewed", block))


def test_one_inner_function_twice_in_one_program():
  """A program calls one jitted block twice, with different tokens.

  JAX may lower the block once and call it twice. Then one op of the module runs
  as two exchanges, in either order.
  """

  @jax.jit
  def inner(topk_idx, *x):
    return block(Ops(ep.ep_prepare(layer(), topk_idx)), *x)

  def inner_and_back(ops, topk_idx, *x):
    fn = functools.partial(inner, topk_idx)
    if not isinstance(ops, Ops):
      fn = functools.partial(block, ops)
    out, vjp = jax.vjp(fn, *x)
    return out, vjp(x[0])

  claims = [
    (case, inner_and_back, case.topk_idx, tokens, weights)
    for case, _, tokens, weights, _ in map(claim, ROUTINGS[:2])
  ]
  want = [expected(*claim) for claim in claims]
  for _ in range(8):
    assert_same(run(*claims), want)


# --- Threads ------------------------------------------------------------------

MESH = f"ep{jax.device_count()}"
SEVERAL = jax.process_count() > 1


@not_with_xla("JAX requires one order of launches on all processes")
@pytest.mark.skipif(
  jax.local_device_count() > 1,
  reason="the waiting callbacks may occupy all of JAX's threads",
)
def test_a_thread_goes_on_after_another():
  """A second thread launches a program while the first thread's program waits.

  All ranks run the ops in the same order. A rank on a GPU cannot know this, and
  raises an error.
  """
  waits, goes_on = threading.Event(), threading.Event()

  def wait(tokens, _):
    waits.set()
    assert goes_on.wait(TIMEOUT_S)
    return tokens

  def interrupted(ops, tokens, weights):
    total = ops.handle.total_recv_tokens  # so that ep_prepare comes first
    tokens = io_callback(wait, jax.typeof(tokens), tokens, total)
    return round_trip(ops, tokens, weights)

  view = functools.partial(local_view, check_vma=False)
  with (
    bootstrap(make_mesh(MESHES[MESH])) as group,
    concurrent.futures.ThreadPoolExecutor() as pool,
  ):
    case = Case(ep.EpLayerConfig(group), whole=True)
    arrays = case.tokens(), case.weights()
    want = expected(case, round_trip, *arrays)
    first = pool.submit(
      lambda: jax.block_until_ready(case.run(interrupted, *arrays, view=view))
    )
    assert waits.wait(TIMEOUT_S)
    assert_same(case.run(round_trip, *arrays), want)
    goes_on.set()
    if not GPU:
      return assert_same(first.result(), want)
    with pytest.raises(ep.EpError, match="goes on after an op of"):
      first.result()


@pytest.mark.skipif(
  SEVERAL and (BACKEND == "xla" or GPU or jax.local_device_count() > 1),
  reason="only host on one device: processes launch in one order",
)
def test_many_threads(request):
  """Each thread launches its program eight times before it waits.

  In one process the threads also compile at the same time. Several processes
  must compile in one order, but they may launch in any order. Their programs
  are small, because JAX runs a small program on the thread that launches it. A
  larger program occupies a thread of JAX's pool, which has one per core, and
  the processes could fill their pools with different programs.
  """
  parts = []
  for i in range(4):
    case = Case(layer(MESH), ["uniform", "skewed"][i % 2], whole=True)
    fn = block if SEVERAL or i < 2 else block_and_back
    tokens = case.tokens() * np.float32(1 + i)
    arrays = tokens, case.weights(), case.tokens()
    parts.append((case, functools.partial(fn), *arrays))
  if SEVERAL:
    for part in parts:
      jax.block_until_ready(run(part))

  def worker(part, want):
    for _ in range(request.config.getoption("load_rounds")):
      for (out,) in [run(part) for _ in range(8)]:
        assert_same(out, want)

  want = [expected(case, fn.func, *arrays) for case, fn, *arrays in parts]
  with concurrent.futures.ThreadPoolExecutor(len(parts)) as pool:
    list(pool.map(worker, parts, want))
