# SPDX-License-Identifier: Apache-2.0
"""A rank may fork children, whose exit does not affect the rank's group.

A child may load data, for example. It must not call JAX, which warns that the
child has none of JAX's threads.
"""

import gc
import multiprocessing
import os
import weakref

import pytest

from cases import Case
from conftest import make_mesh, TIMEOUT_S
import ep
from ep._src.group import bootstrap as groups_of_process
from groups import BACKEND, bootstrap
from op_functions import handle_of

pytestmark = [
  pytest.mark.skipif(
    BACKEND == "xla", reason="xla: a group has no system resources"
  ),
  pytest.mark.filterwarnings("ignore:os.fork"),
]


def run_child(act):
  """Forks a child that calls `act`, and checks that the child exits with 0."""
  pid = os.fork()
  if pid == 0:
    code = 1
    try:
      act()
      code = 0
    finally:
      os._exit(code)
  assert os.waitpid(pid, 0) == (pid, 0)


def run_exit_handlers():
  """Runs Python's exit handlers, except those of JAX.

  JAX's handlers use the parent's connection to the coordination service, and
  would also terminate the parent.
  """
  groups_of_process._close_all()
  weakref.finalize._exitfunc()


def expect_refused(group):
  """Checks that every use of the group raises an error with the parent's id."""
  owner = f"the id {os.getppid()}, of which this one is a forked child"
  case = Case(ep.EpLayerConfig(group))
  for use in (group.raise_failures, lambda: case.run(handle_of)):
    with pytest.raises(RuntimeError, match=owner):
      use()
  ep.ep_finalize(group)


def test_the_parent_goes_on():
  """The parent's results stay exact, and all ranks can finalize the group."""
  group = bootstrap(make_mesh({"ep": 4}), timeout_s=TIMEOUT_S)
  case = Case(ep.EpLayerConfig(group))

  step = case.check_round_trip
  step()

  def drop():
    vars(group).clear()
    gc.collect()

  for child in run_exit_handlers, lambda: expect_refused(group), drop:
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
