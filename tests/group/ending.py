# SPDX-License-Identifier: Apache-2.0
"""Ranks that end in a way that ends_test states: ending.py CODE...

Rank r runs the r-th CODE, or the last one, with the functions of this file.
Functions that need JAX import it: most jobs of the launcher have no use for it.
"""

import contextlib
import faulthandler
import functools
import gc
import glob
import os
import pathlib
import resource
import signal
import subprocess
import sys
import time

RANK = int(os.environ["JAX_PROCESS_ID"])
RANKS = int(os.environ["JAX_NUM_PROCESSES"])
FOLDER = pathlib.Path(os.environ["TMPDIR"]).parent

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


# --- Ends of this process ----------------------------------------------------


def die(way, event="end"):
  """Ends this process by a signal, an exit code, or otherwise."""
  note("pid", str(os.getpid()))
  say(event, "happens")
  if way == "raise":
    raise ValueError("no data")
  if way == "memory":
    fill_memory()
  if not isinstance(way, str):
    sys.exit(way)
  signal.raise_signal(signal.Signals[f"SIG{way}"])


def fill_memory():
  """Makes a large array with little memory."""
  import jax

  pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
  most = pages * resource.getpagesize() + (64 << 20)
  resource.setrlimit(resource.RLIMIT_AS, (most, most))
  jax.block_until_ready(jax.numpy.zeros(1 << 30))


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

  launch.initialize()
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
      jax.block_until_ready(function(x))

  return run


def forever(run):
  while True:
    run()


def prepare(timeout_s=LONG_S, launches=2):
  """Returns a function that launches ep_prepare, without a wait at the last."""
  import jax
  import jax.numpy as jnp

  initialize()
  import ep

  of_all, left = mesh(), [launches]
  group = ep.ep_bootstrap(of_all, num_experts=RANKS, timeout_s=timeout_s)
  layer = ep.EpLayerConfig(group, name="moe_3", top_k=1)
  rows = jax.NamedSharding(of_all, jax.P("ep"))
  ids = jax.device_put(jnp.zeros((4 * RANKS, 1), jnp.int32), rows)
  program = jax.jit(lambda ids: ep.ep_prepare(layer, ids).mem)

  def run():
    left[0] -= 1
    out = program(ids)
    note("launched")
    return jax.block_until_ready(out) if left[0] else out

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


def say_what_is_left():
  """Bootstraps a group, and says at exit whether it is open."""
  import atexit
  import weakref

  global thing  # lives until Python clears this module
  thing = lambda: 0  # noqa: E731  (It has weak references.)
  weakref.finalize(thing, print, "finalizers")  # Python now runs these last
  import jax  # noqa: F401  (It registers its exit handlers.)

  atexit.register(lambda: print("group is open:", group.connection.is_open))
  initialize()
  import ep

  group = ep.ep_bootstrap(mesh(), num_experts=RANKS)


def leave_loop():
  """Launches a long loop with a psum of XLA, on the devices of one process."""
  import jax
  import jax.numpy as jnp

  ep, groups = world()
  layer = groups.layer("dp2_ep2", top_k=1)

  def steps(x):
    def step(_, x):
      handle = ep.ep_prepare(layer, jnp.zeros((len(x), 1), int))
      rows, weights = ep.ep_dispatch(handle, x, jnp.ones((len(x), 1)))
      return jax.lax.pmean(ep.ep_combine(handle, rows, weights), "dp")

    return jax.lax.fori_loop(0, 500, step, x)

  specs = dict(in_specs=groups.spec(layer), out_specs=groups.spec(layer))
  program = jax.shard_map(
    steps, mesh=layer.group.mesh, check_vma=False, **specs
  )
  print(jax.jit(program)(jnp.ones((20, 7))).shape)


def psum(exit_after_s):
  """Makes ep_prepare fail in domain 0, while domain 1 waits in a psum."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  ep, groups = world()
  from conftest import make_mesh

  of_all = make_mesh(groups.MESHES["dp2_ep2"])
  group = groups.bootstrap(of_all, top_k=1, exit_after_s=exit_after_s)
  layer = ep.EpLayerConfig(group, name="moe_3", recv_capacity_per_rank=8)

  def before(domain):
    if domain == 0:
      wait_until(lambda: len(notes("past_*")) == 2)
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
  try:
    jax.block_until_ready(jax.jit(program)())
  except ep.EpError as e:
    say("psum", str(e))
  wait_until(lambda: "exit_after_s" in (FOLDER / "rank_1.log").read_text())
  os._exit(0)


# --- Ends of a group on `host`, one after another ----------------------------


class Ends:
  """Ends in a job of ranks that go on with a new group after each end.

  Each method is an end, and all living ranks call it. They say their errors.
  """

  def __init__(self, timeout_s, exit_after_s):
    self.timeout_s, self.exit_after_s = timeout_s, exit_after_s
    self.ep, self.groups = world()
    self.alive = list(range(RANKS))

  def bootstrap(self, name, **options):
    # 12 experts can be split evenly over any number of living ranks.
    options = dict(num_experts=12, name=name, timeout_s=LONG_S) | options
    return self.groups.bootstrap(mesh(self.alive), **options)

  def layer(self, group):
    """Returns a layer whose ep_prepare has no XLA collective before the op."""
    options = dict(overflow="drop", drop_by="fair", recv_capacity_per_rank=29)
    return self.ep.EpLayerConfig(group, name="moe_3", **options)

  def meet(self, name):
    note(name)
    wait_for(name, len(self.alive))

  def expect(self, event, function, *args, **options):
    """Says the error of a function, whose results must not be ready."""
    import jax

    try:
      jax.block_until_ready(function(*args, **options))
    except (*self.ep.EpError, OSError) as e:
      say(event, str(e))
    else:
      raise AssertionError(f"{event}: no error came")

  def no_library(self, rank):
    """One rank has no native library."""
    event = "no library"
    if rank == RANK:
      os.environ["EP_FFI_LIBRARY_PATH"] = "nowhere.so"
      say(event, "happens")
    self.expect(event, self.bootstrap, event)
    os.environ.pop("EP_FFI_LIBRARY_PATH", None)

  def overflow(self):
    """A process that goes on after a failure ignores `exit_after_s`."""
    import jax
    import numpy as np

    from conftest import to_global

    with self.bootstrap(
      "overflow", top_k=1, exit_after_s=self.exit_after_s
    ) as group:
      layer = self.ep.EpLayerConfig(group, recv_capacity_per_rank=8)
      program = jax.jit(lambda ids: self.ep.ep_prepare(layer, ids).mem)

      def run(expert):
        ids = np.full((20, 1), expert, np.int32)
        ids = to_global(ids, group.mesh, self.groups.spec(layer))
        jax.block_until_ready(program(ids))

      run(-1)
      say("overflow", "happens")
      self.expect("overflow", run, 0)
      run(-1)
      time.sleep(2 * self.exit_after_s)
      run(-1)

  def prepare(self, group):
    """Returns a compiled ep_prepare, so that all ranks run it together."""
    import jax

    from cases import Case

    case = Case(self.layer(group))
    ids, weights = case.put(case.topk_idx), case.put(case.weights())
    program = jax.jit(lambda *x: self.ep.ep_prepare(case.layer, *x).mem)
    program = program.lower(ids, weights).compile()
    return lambda: jax.block_until_ready(program(ids, weights))

  def stop(self, rank):
    """A rank stops for longer than `timeout_s`; then all go on."""
    with self.bootstrap("stop", timeout_s=self.timeout_s) as group:
      run = self.prepare(group)
      self.meet("compiled")
      run()
      if rank == RANK:
        note("stops", str(os.getpid()))
        say("stop", "happens")
        os.kill(os.getpid(), signal.SIGSTOP)
      self.expect("stop", run)
      note("told")
      if self.alive[0] == RANK:
        wait_for("told", len(self.alive) - 1)
        pid = pathlib.Path(*notes("stops")).read_text()
        os.kill(int(pid), signal.SIGCONT)
      wait_for("told", len(self.alive))
      run()
      self.meet("went_on")

  def late(self, rank):
    """A rank never arrives at an op, and is late for the next bootstrap."""
    group = self.bootstrap("late", timeout_s=self.timeout_s)
    run = self.prepare(group)
    self.meet("in_time")
    others = [r for r in self.alive if r != rank]
    if rank == RANK:
      say("late", "happens")
      wait_for("lost", len(others))
    else:
      self.expect("late", run)
      note("next")
      wait_for("next", len(others))
      if others[0] == RANK:
        say("lost", "happens")
    self.expect("lost", self.bootstrap, "lost", timeout_s=self.timeout_s)
    note("lost")
    with contextlib.suppress(self.ep.EpError):
      self.ep.ep_finalize(group)

  def death(self, rank, way, op, when):
    """A rank dies before an op, or during it, while all others wait for it."""
    event, name = (
      f"{rank} {way} {op} {when}",
      f"death_{RANKS - len(self.alive)}",
    )
    before = descriptors()

    def arrive(at):
      if at != op:
        return
      if rank != RANK:
        return note(name)
      wait_for(name, len(self.alive) - 1)
      if when == "during":
        time.sleep(0.3)  # Now the others wait for this rank.
      die(way, event)

    with contextlib.suppress(self.ep.EpError), self.bootstrap(name) as group:
      step = Step(self.layer(group))
      step.run(lambda op: None)
      self.expect(event, step.run, arrive)
    wait_until(lambda: gc.collect() or descriptors() == before)
    self.alive.remove(rank)

  def leave(self):
    """Exits when all living ranks have come here.

    Skips JAX's shutdown, which would wait for dead ranks.
    """
    with self.bootstrap("last") as group:
      Step(self.layer(group)).run(lambda op: None)
    self.meet("leaves")
    os._exit(0)


class Step:
  """A step of three programs, whose result every rank knows."""

  def __init__(self, layer):
    import jax

    from cases import Case

    ep, _ = world()
    self.case = Case(layer)
    self.tokens, self.weights = self.case.tokens(), self.case.weights()
    self.prepare = jax.jit(lambda *x: ep.ep_prepare(layer, *x))
    self.dispatch, self.combine = map(jax.jit, (ep.ep_dispatch, ep.ep_combine))

  def run(self, arrive):
    """Runs the step; calls `arrive` with the name of each op before it."""
    import jax
    import numpy as np

    from conftest import assert_shards_equal

    ids, tokens, weights = map(
      self.case.put, (self.case.topk_idx, self.tokens, self.weights)
    )
    arrive("prepare")
    handle = jax.block_until_ready(self.prepare(ids, weights))
    arrive("dispatch")
    rows = jax.block_until_ready(self.dispatch(handle, tokens, weights))
    arrive("combine")
    out = jax.block_until_ready(self.combine(handle, *rows))
    expected = np.zeros_like(self.tokens)
    for weight in self.weights.T:
      expected += weight[:, None] * self.tokens
    assert_shards_equal(out, expected)


def descriptors():
  """Returns how many sockets, pidfds and mappings of ep this process has."""
  unix = pathlib.Path("/proc/net/unix")
  sockets = {
    fields[6]
    for fields in map(str.split, unix.read_text().splitlines())
    if fields[4] == "0005"  # SOCK_SEQPACKET
  }
  held = 0
  for fd in os.listdir("/proc/self/fd"):
    with contextlib.suppress(FileNotFoundError):
      target = os.readlink(f"/proc/self/fd/{fd}")
      held += target == "anon_inode:[pidfd]" or target[8:-1] in sockets
  maps = pathlib.Path("/proc/self/maps").read_text()
  return held + maps.count("memfd:ep_ffi")


if __name__ == "__main__":
  exec(sys.argv[1:][min(RANK, len(sys.argv) - 2)])
