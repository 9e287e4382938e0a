# SPDX-License-Identifier: Apache-2.0
"""Ranks of jobs that end or stand still: ending.py CODE...

Rank r runs the r-th CODE, or the last one, with the functions of this file.
ends_test and watch_test have the codes. Functions that need JAX import it: most
jobs of the launcher have no use for it.
"""

import faulthandler
import functools
import glob
import os
import pathlib
import signal
import subprocess
import sys
import time

RANK = int(os.environ["JAX_PROCESS_ID"])
RANKS = int(os.environ["JAX_NUM_PROCESSES"])
FOLDER = pathlib.Path(os.environ["TMPDIR"]).parent

ALIVE = [*range(RANKS)]  # `death` removes ranks.
LONG_S = 50.0  # A timeout_s that no job reaches.


def say(event, text):
  """Logs the time of a text about an event."""
  print(f"at {time.monotonic():.3f}: {event}: {' '.join(text.split())}")


def note(name, text=""):
  """Tells the other ranks something, in the job's folder."""
  draft = FOLDER / f".{name}.{RANK}"
  draft.write_text(text)
  draft.rename(FOLDER / f"{name}.{RANK}")


def notes(name):
  return glob.glob(f"{FOLDER}/{name}.*")


def wait_until(holds):
  deadline = time.monotonic() + 60
  while not holds():
    assert time.monotonic() < deadline, "waited in vain"
    time.sleep(0.01)


def wait_for(name, ranks=1):
  wait_until(lambda: len(notes(name)) >= ranks)


def meet(name):
  """Waits until all living ranks have come here."""
  note(name)
  wait_for(name, len(ALIVE))


# --- Ends of this process ----------------------------------------------------


def die(way, event="end"):
  """Ends this process by a signal, an exit code, or otherwise."""
  note("pid", str(os.getpid()))
  say(event, "happens")
  if way == "raise":
    raise ValueError("no data")
  if not isinstance(way, str):
    sys.exit(way)
  signal.raise_signal(signal.Signals[f"SIG{way}"])


def hang(ignore=None):
  if ignore is not None:
    faulthandler.disable()
    signal.signal(ignore, signal.SIG_IGN)
  note("hangs")
  time.sleep(600)


def stop_launcher():
  """Lets the launcher notice later, like a launcher without processor time."""
  os.kill(os.getppid(), signal.SIGSTOP)


def wait_for_death(state=None):
  """Waits until the launcher has reaped a rank, or a dead rank has a state."""
  wait_for("pid")
  stat = pathlib.Path("/proc", pathlib.Path(*notes("pid")).read_text(), "stat")
  wait_until(lambda: state in stat.read_text() if state else not stat.exists())


def fail_after_death():
  """Exits because another rank has died, which the launcher notices later."""
  wait_for_death(") Z")
  tell_launcher("ending")
  print("line", 1)
  note("failed")
  wait_for("failed", RANKS - 1)
  time.sleep(0.2)
  os.kill(os.getppid(), signal.SIGCONT)
  sys.exit(f"rank {RANK} lost a rank")


def tell_launcher(state):
  """Tells the launcher a state of this rank, as ep does."""
  path = f"{os.environ['EP_LAUNCH_STATE']}.{state}"
  pathlib.Path(path).write_text(str(time.monotonic()))


def start_child():
  subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


def stop_slowly():
  """Makes SIGTERM take some time."""

  def stop(*_):
    time.sleep(0.5)
    print("stopped")
    os._exit(0)

  signal.signal(signal.SIGTERM, stop)


# --- Ranks of JAX -----------------------------------------------------------


def initialize():
  from ep import launch

  launch.initialize(exit_at_once=True)
  launch.initialize()  # Later calls do nothing.


def load_library():
  """Joins the other ranks, and loads the library before JAX makes devices."""
  import jax

  initialize()
  from ep._src.native import ffi

  assert not jax._src.xla_bridge.backends_are_initialized()
  ffi.library("host")


@functools.cache
def world():
  """Returns the modules that a rank with groups needs."""
  import conftest  # noqa: F401  (It makes this process a rank.)
  import ep
  import groups

  return ep, groups


def mesh(ranks=None):
  import jax

  devices = [
    d for d in jax.devices() if ranks is None or d.process_index in ranks
  ]
  axis = (jax.sharding.AxisType.Auto,)
  return jax.make_mesh((len(devices),), ("ep",), axis, devices=devices)


def xla(what):
  """Returns a function that runs a program with collectives of XLA."""
  import jax
  import numpy as np

  initialize()
  import ep

  ranks, of_all = jax.device_count(), mesh()
  group = ep.ep_bootstrap(of_all, num_experts=ranks, backend="xla")
  rows = jax.NamedSharding(of_all, jax.P("ep"))
  x = jax.make_array_from_callback(
    (ranks, 4), rows, lambda i: np.zeros((ranks, 4), np.float32)[i]
  )

  def move(x):
    placement = ep.Placement([*range(ranks)][::-1])
    return ep.moe.move(group, x, jax.P("ep"), old=None, new=placement)

  def op(x):
    ids = jax.lax.broadcasted_iota(np.int32, (len(x), 1), 0)
    return ep.ep_prepare(ep.EpLayerConfig(group, top_k=1), ids).mem

  def run():
    with jax.set_mesh(of_all):
      function = dict(move=move, op=op, psum=jax.jit(jax.numpy.sum))[what]
      return jax.block_until_ready(function(x))

  return run


def forever(run):
  while True:
    run()


def prepare(**options):
  """Returns a function that runs a compiled ep_prepare of a new group."""
  import jax
  import jax.numpy as jnp

  initialize()
  import ep

  of_all = mesh()
  group = ep.ep_bootstrap(of_all, num_experts=of_all.size, **options)
  layer = ep.EpLayerConfig(group, name="moe_3", top_k=1)
  rows = jax.NamedSharding(of_all, jax.P("ep"))
  ids = jax.device_put(jnp.zeros((4 * of_all.size, 1), jnp.int32), rows)
  program = jax.jit(lambda ids: ep.ep_prepare(layer, ids).mem)
  program = program.lower(ids).compile()
  meet("compiled")

  def run(layer=layer):  # It keeps the group open.
    return jax.block_until_ready(program(ids))

  return run


def sleep_on_device(seconds):
  """Launches a program that sleeps, and does not wait for it.

  With a ready input, JAX would wait in the launch.
  """
  import jax
  import numpy as np

  def wait(x):
    time.sleep(seconds)
    return np.asarray(x)

  x = np.zeros((600, 600), np.float32)
  last = jax.jit(lambda x: jax.pure_callback(wait, x, x)).lower(x).compile()
  first = jax.jit(lambda x: jax.lax.fori_loop(0, 60, lambda _, y: y @ x, x))
  return last(first(x))


def psum(exit_after_s):
  """Makes ep_prepare fail in domain 0, while domain 1 waits in a psum."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  ep, groups = world()
  from conftest import make_mesh

  of_all = make_mesh(groups.MESHES["dp2_ep2"])
  # Nothing ends after timeout_s, which is longer than the test.
  times = dict(timeout_s=600.0, exit_after_s=exit_after_s)
  group = groups.bootstrap(of_all, top_k=1, **times)
  layer = ep.EpLayerConfig(group, name="moe_3", recv_capacity_per_rank=8)

  def before(domain):
    if domain == 0:
      wait_until(lambda: len(notes("past_*")) == 2)
      say("psum", "happens")
    return np.asarray(domain)

  def after(domain, rank, rows):
    if domain == 1:
      note(f"past_{rank}")
    return np.asarray(rows)

  def step():
    scalar = jax.ShapeDtypeStruct((), np.int32)
    domain, rank = jax.lax.axis_index("dp"), jax.lax.axis_index("ep")
    domain = jax.pure_callback(before, scalar, domain)
    # In domain 0 all tokens choose expert 0; in domain 1 they choose none.
    handle = ep.ep_prepare(layer, jnp.full((5, 1), -domain))
    rows = handle.total_recv_tokens.sum()
    rows = jax.pure_callback(after, scalar, domain, rank, rows)
    return jax.lax.psum(rows, ("dp", "ep"))

  program = jax.shard_map(step, mesh=of_all, in_specs=(), out_specs=jax.P())
  expect_error("psum", jax.jit(program))
  wait_until(lambda: "exit_after_s" in (FOLDER / "rank_1.log").read_text())
  os._exit(0)


# --- Ranks of `host` that go on after an end ----------------------------------


def expect_error(event, function, *args):
  import jax

  ep, _ = world()
  try:
    jax.block_until_ready(function(*args))
  except ep.EpError as e:
    say(event, str(e))
  else:
    raise AssertionError(f"{event}: no error came")


def stop(rank, **options):
  """A rank stops for longer than `timeout_s`; then all go on."""
  run = prepare(**options)
  run()
  meet("stepped")
  if rank == RANK:
    note("pid", str(os.getpid()))
    say("stop", "happens")
    os.kill(os.getpid(), signal.SIGSTOP)
  expect_error("stop", run)
  note("told")
  if rank != RANK:
    wait_for("told", RANKS - 1)
    os.kill(int(pathlib.Path(*notes("pid")).read_text()), signal.SIGCONT)
  meet("told")
  run()
  time.sleep(1 + options["exit_after_s"])  # It ends no process that goes on.
  run()
  meet("went_on")


def step(name, arrive=lambda op: None):
  """Runs two steps in a new group; `arrive` gets each op of the second one."""
  import jax

  from cases import assert_same, Case, expected
  from op_functions import round_trip

  ep, groups = world()
  # 12 experts can be split evenly over any number of living ranks.
  options = dict(num_experts=12, name=name, timeout_s=LONG_S)
  with groups.bootstrap(mesh(ALIVE), **options) as group:
    case = Case(ep.EpLayerConfig(group, name="moe_3"), whole=True)
    arrays = case.topk_idx, case.tokens(), case.weights()
    ids, tokens, weights = map(case.put, arrays)
    for arrive_at in (lambda op: None), arrive:  # The first step compiles.
      arrive_at("prepare")
      handle = jax.block_until_ready(ep.ep_prepare(case.layer, ids))
      arrive_at("dispatch")
      rows = jax.block_until_ready(ep.ep_dispatch(handle, tokens, weights))
      arrive_at("combine")
      out = jax.block_until_ready(ep.ep_combine(handle, *rows))
      assert_same(out, expected(case, round_trip, *arrays[1:]))


def death(rank, way, op, when):
  """A rank dies before an op, or during it, while all others wait for it."""
  event, name = f"{rank} {way} {op} {when}", f"death_{RANKS - len(ALIVE)}"

  def arrive(at):
    if at != op:
      return
    if rank != RANK:
      return note(name)
    wait_for(name, len(ALIVE) - 1)
    if when == "during":
      time.sleep(0.3)  # Now the others wait for this rank.
    die(way, event)

  expect_error(event, step, name, arrive)
  ALIVE.remove(rank)


def leave():
  """Runs a last step, and exits when all living ranks have.

  Skips JAX's shutdown, which would wait for dead ranks.
  """
  step("last")
  meet("leaves")
  os._exit(0)


# --- Ranks that stand still under ep.watch ------------------------------------


def load_batch(cause):
  while not (FOLDER / cause).exists():
    time.sleep(0.05)


def sleeping():
  load_batch("sleeping")


def evaluating():
  """Waits in a program that no other process runs."""
  import jax
  import numpy as np

  import ep

  def score(x):
    load_batch("evaluating")
    return np.asarray(x)

  program = jax.jit(lambda x: jax.pure_callback(score, x, x))
  with ep.watch.step("evaluate") as launched:
    launched(program(np.float32(1))).block_until_ready()


def raising():
  import ep

  try:
    with ep.watch.step("train"):
      raise KeyError("shard 7")
  except KeyError:
    load_batch("raising")


def stopped():
  os.kill(os.getpid(), signal.SIGSTOP)


def stand_still(run, *causes):
  """Runs steps of `run` without end, which wait once for each cause."""
  import jax

  import ep

  def step():
    with ep.watch.step("train") as launched:
      launched(run())

  step()
  for cause in causes:
    with ep.watch(stall_s=1):
      step()
      step()
      if RANK == RANKS - 1:
        cause()
      step()
  with ep.watch(stall_s=1, exit_after_s=2):
    try:
      while True:
        step()
        print("stepped")
        time.sleep(0.1)
    except jax.errors.JaxRuntimeError:  # the other process ended
      time.sleep(600)


if __name__ == "__main__":
  exec(sys.argv[1:][min(RANK, len(sys.argv) - 2)])
