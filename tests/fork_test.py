"""Children that are forked from a rank, and end as they like.

They may load data, say, but not call JAX, which warns that it has no threads in
such a child.
"""

import gc
import multiprocessing
import os
import subprocess
import sys
import weakref

import pytest

from cases import BACKEND, bootstrap, Case, there_and_back
from conftest import make_mesh, TIMEOUT_S
import ep
from ep._src import group as group_module

pytestmark = [
  pytest.mark.skipif(
    BACKEND == "xla", reason="xla: a group holds nothing of the system"
  ),
  pytest.mark.filterwarnings("ignore:os.fork"),
]


def run_exit_handlers():
  """Does what Python does at exit, but for JAX's own handlers.

  Those use the connection of the parent to the coordination service, with
  which the parent dies as well.
  """
  group_module._end_all()
  weakref.finalize._exitfunc()


def drop(group):
  """Drops the last references that a child can."""
  vars(group).clear()
  gc.collect()


def expect_refused(group):
  """Whatever the group is asked for, it says whose it is."""
  said = f"the id {os.getppid()}, of which this one is a forked child"
  for use in (group.memory, group.check, lambda: Case(a_layer(group)).run(ids)):
    with pytest.raises(RuntimeError, match=said):
      use()
  ep.ep_finalize(group)


def a_layer(group):
  return ep.EpLayerConfig(group)


def ids(layer, topk_idx):
  return ep.ep_prepare(layer, topk_idx)


def run_child(act):
  pid = os.fork()
  if pid == 0:
    code = 1
    try:
      act()
      code = 0
    finally:
      os._exit(code)
  assert os.waitpid(pid, 0) == (pid, 0)


def test_the_parent_goes_on():
  """With exact results, and an end in good order on all ranks."""
  group = bootstrap(make_mesh({"ep": 4}), timeout_s=TIMEOUT_S)
  case = Case(a_layer(group))

  def step():
    case.check(there_and_back, case.tokens(), case.weights())

  step()
  for child in (
    run_exit_handlers,
    lambda: expect_refused(group),
    lambda: drop(group),
  ):
    run_child(child)
    step()
  loader = multiprocessing.get_context("fork").Process(
    target=ep.ep_finalize, args=(group,)
  )
  loader.start()
  loader.join()
  assert loader.exitcode == 0
  step()
  ep.ep_finalize(group)


def test_a_child_that_exits():
  """By itself: its own handlers, and those of JAX, which may not end."""
  program = """
import os, signal, sys, time
import jax
import jax.numpy as jnp
import ep
mesh = jax.make_mesh((2,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
group = ep.ep_bootstrap(
  mesh, num_experts=2, max_tokens_per_rank=1, hidden_dim=1, top_k=1,
  timeout_s=20)
layer = ep.EpLayerConfig(group)
prepare = jax.jit(lambda ids: ep.ep_prepare(layer, ids).total_recv_tokens)
child = os.fork()
if child == 0:
  sys.exit()
try:
  for _ in range(20):  # while the child ends
    print(prepare(jnp.array([[0], [0]])).ravel())
    time.sleep(0.1)
  ep.ep_finalize(group)
finally:
  os.kill(child, signal.SIGKILL)
"""
  env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
  ended = subprocess.run(
    [sys.executable, "-W", "ignore", "-c", program],
    env=env
    | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    | {"JAX_PLATFORMS": "cpu"},
    stdout=subprocess.PIPE,
    text=True,
    timeout=50,
  )
  assert ended.returncode == 0
  assert ended.stdout == "[2 0]\n" * 20
