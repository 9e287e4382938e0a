# SPDX-License-Identifier: Apache-2.0
"""Groups use their memory again, and release all resources when they close.

    python -m pytest tests/group/lifetime_test.py --lifetimes=10000

Tests that compile a program for each group make fewer groups.
"""

import contextlib
import gc
import multiprocessing
import os
import weakref

import jax
import pytest

from cases import assert_same, Case, expected, global_view
from conftest import make_mesh, TIMEOUT_S
import ep
from ep._src.group import bootstrap as groups_of_process
from ep.testing._footprint import Footprint
from groups import bootstrap, not_with_xla
from op_functions import handle_of, round_trip

LIFETIMES_OF_A_PROGRAM = 20
KEPT_PROGRAMS = 2
OF_A_PROGRAM = 8  # KiB that JAX's caches keep until `jax.clear_caches`

# Limits on the growth in all lifetimes after the warm-up. JAX 0.11.2 fills
# caches of 2 MiB with the first 30 programs, and then stops. Threads of the
# last group may still be exiting.
MOST = Footprint(memory=5 << 10, heap=2 << 10, descriptors=0, threads=8)


@pytest.fixture
def lifetimes(request):
  return request.config.getoption("lifetimes")


def check_lifetimes(times, use, kept=0):
  """Makes groups one after another, and checks the growth after a warm-up.

  JAX's caches keep `kept` KiB of each lifetime.
  """
  mesh = make_mesh({"ep": 4})

  def once():
    with bootstrap(mesh) as group:
      use(group)

  for _ in range(max(2, times // 10)):
    once()
  before = Footprint.now()
  for _ in range(times):
    once()
  more = kept * times
  before.check_now(
    MOST._replace(memory=MOST.memory + more, heap=MOST.heap + more)
  )


def test_groups(lifetimes):
  check_lifetimes(lifetimes, lambda group: None)


def a_case(group):
  return Case(ep.EpLayerConfig(group), "skewed", whole=True)


def program_and_inputs(group):
  case = a_case(group)
  inputs = case.topk_idx, case.tokens(), case.weights()
  program = jax.jit(global_view(case.layer, round_trip))
  return program, [*map(case.put, inputs)]


def run_program(group, want):
  program, inputs = program_and_inputs(group)
  assert_same(program(*inputs), want)


def compile_program(group):
  """Returns a compiled program that outlives its function, and its inputs."""
  program, inputs = program_and_inputs(group)
  return program.lower(*inputs).compile(), inputs


@pytest.fixture
def want():
  with bootstrap(make_mesh({"ep": 4})) as group:
    case = a_case(group)
    return expected(case, round_trip, case.tokens(), case.weights())


def test_a_program_is_released_with_its_function(lifetimes, want):
  """A released program releases its group, even if JAX caches program parts."""
  check_lifetimes(
    lifetimes // LIFETIMES_OF_A_PROGRAM,
    lambda group: run_program(group, want),
    kept=OF_A_PROGRAM,
  )


only_native = not_with_xla("a group has no system resources")


@only_native
def test_resources_that_programs_keep(want):
  """A program keeps its group open unless the group is finalized."""
  mesh = make_mesh({"ep": 4})
  most = Footprint(memory=32 << 10, heap=32 << 10, descriptors=0, threads=8)
  with bootstrap(mesh) as group:
    compile_program(group)[0]
  before = Footprint.now()
  kept = []
  for _ in range(KEPT_PROGRAMS):
    with bootstrap(mesh) as group:
      program, inputs = compile_program(group)
      assert_same(program(*inputs), want)
      kept.append(program)
  before.check_now(most)
  with pytest.raises((RuntimeError, ValueError), match="was finalized"):
    jax.block_until_ready(program(*inputs))

  for _ in range(KEPT_PROGRAMS):
    del group  # the last reference
    group = bootstrap(mesh)
    program, inputs = compile_program(group)
    kept.append(program)
  del group
  gc.collect()
  for program in kept[KEPT_PROGRAMS:]:
    assert_same(program(*inputs), want)
  del kept, program
  before.check_now(most)


@only_native
def test_finalize_with_launches_in_flight(want):
  """Each launch gives the right result, or fails because of ep_finalize."""
  mesh = make_mesh({"ep": 4})
  for launches in (1, 2, 4, 8):
    group = bootstrap(mesh)
    program, inputs = compile_program(group)
    assert_same(program(*inputs), want)
    outputs = []
    for _ in range(launches):
      with contextlib.suppress(ValueError, RuntimeError):  # other ranks' errors
        outputs.append(program(*inputs))
    with contextlib.suppress(ValueError, RuntimeError):  # ranks ran fewer ops
      ep.ep_finalize(group)
    for output in outputs:
      try:
        jax.block_until_ready(output)
      except (ValueError, RuntimeError) as e:
        assert "finalized" in str(e)
      else:
        assert_same(output, want)


# --- Children -----------------------------------------------------------------
#
# A rank may fork children, which load data, for example. Their exit does not
# affect the group of the rank. A child must not call JAX, which warns that the
# child has none of the threads of JAX.


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
  """Runs Python's exit handlers, but not JAX's.

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


@only_native
@pytest.mark.filterwarnings("ignore:os.fork")
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
