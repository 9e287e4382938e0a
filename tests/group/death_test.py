# SPDX-License-Identifier: Apache-2.0
"""If a rank dies, the other ranks get an error soon and can go on without it.

A text such as "3 kill dispatch during" describes a death: the rank, the way,
the place and the moment. All ranks of a job but one die. After each death the
survivors get an error, finalize their group, and go on in a new group. These
are the places and moments:

    an op       before: the rank has completed the previous op
                during: all other ranks wait for the rank in the op
                posted: the rank has called the op, and no other rank has
    bootstrap   during: the rank has exchanged addresses, but has no connection
    finalize    before: the other ranks finalize, and the rank never does
                after: the rank has finalized, and the other ranks go on working
    7ms         that long after a program of all ops began; not with "exit",
                which only the main thread can do

The way "stop" is no death, and only comes first: the rank stops before an op
twice. The first time it continues within the timeout, the second time after the
other ranks have failed. failure_test runs the deaths in ops, `IN_OPS`.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import os
import pathlib
import re
import signal
import sys
import threading
import time

import jax
import numpy as np
import pytest

from cases import Case
from conftest import assert_shards_equal
import ep
from ep._src.native import ffi
from groups import BACKEND, bootstrap
from worlds import Rank, RANKS, run_world

ERROR_WITHIN_S = 5.0  # The limit from a death to its error.
LONG_S = 50.0  # A timeout_s that no test reaches.
SHORT_S = 3.0  # A timeout_s that tests reach.

OPS = ["prepare", "dispatch", "combine"]

pytestmark = pytest.mark.skipif(
  BACKEND == "xla", reason="xla: processes do not watch their peers"
)


@dataclasses.dataclass(frozen=True)
class Death:
  """A death that a text such as "3 kill dispatch during" describes."""

  rank: int
  way: str
  where: str
  when: str = ""

  @classmethod
  def parse(cls, text):
    rank, *others = text.split()
    return cls(int(rank), *others)

  @property
  def ops(self):
    """Returns how error messages of the survivors may name the op."""
    if self.where == "bootstrap":
      return ["ep_bootstrap"]
    if self.where not in OPS:
      return ["ep_prepare"] if self.where == "finalize" else ["ep_"]
    at = OPS.index(self.where)
    failing = OPS[at : at + 1 + (self.when == "posted")]
    return [f'ep_{op}(layer "moe_3")' for op in failing]


IN_OPS = (
  "3 stop combine before",
  "3 kill prepare during",
  "2 segv dispatch posted",
  "1 exit combine before",
)
OF_TWO_JOBS = [
  ("2 kill bootstrap during", "1 segv 5ms"),
  ("1 segv finalize before", "0 exit finalize after"),
]


def test_two_jobs_do_not_mix(tmp_path):
  """Two jobs may have groups with equal names at the same time."""
  folders = [tmp_path / "one", tmp_path / "other"]
  for folder in folders:
    folder.mkdir()
  with concurrent.futures.ThreadPoolExecutor() as pool:
    list(pool.map(run_deaths, folders, OF_TWO_JOBS))


def run_deaths(notes, deaths):
  run_traced(__file__, notes, *deaths, processes=1 + len(deaths))
  check_deaths(notes, deaths)


def run_traced(program, notes, *args, **options):
  """Runs a program with traces, and checks that no shared memory is left."""
  shared_memory = set(os.listdir("/dev/shm"))
  env = {"EP_TRACE": str(notes / "traces")}
  run_world(program, notes, *args, **options, env=env)
  assert set(os.listdir("/dev/shm")) <= shared_memory


def check_deaths(notes, deaths):
  """Checks the errors of the survivors of each death."""
  stopped = deaths[0].split()[1] == "stop"
  if stopped:
    check_stop(notes)
  alive = set(range(1 + len(deaths) - stopped))
  slowest = 0.0
  for round, death in enumerate(
    map(Death.parse, deaths[stopped:]), start=2 * stopped
  ):
    if death.where != "bootstrap" and death.when != "before":
      blamed = failure(notes, f"round_{round}").ranks
      assert blamed == (sorted(alive).index(death.rank),)
    alive.remove(death.rank)
    died_at = float((notes / f"died_{round}").read_text())
    for rank in alive:
      error = (notes / f"error_{round}_{rank}").read_text()
      if (death.where, death.when) == ("finalize", "before"):
        assert not error
        continue
      at, message = error.split(" ", 1)
      slowest = max(slowest, float(at) - died_at)
      assert re.search(rf"\bprocess {death.rank}\b", message), message
      assert any(op in message for op in death.ops), message
  assert slowest < ERROR_WITHIN_S
  ended = {int(note.name[5:]) for note in notes.glob("rank_*")}
  assert ended == alive


def failure(notes, group):
  """Returns the failure that the traces of a group show."""
  folder = notes / f"traces_{group}"
  folder.mkdir()
  for part in (notes / "traces").glob(f"{group}[.%]*"):
    part.rename(folder / part.name)
  return ep.explain(folder).failure


def check_stop(notes):
  """Checks that the other ranks fail once, after their timeout."""
  assert failure(notes, "round_0").ranks == (RANKS - 1,)
  for rank in range(RANKS - 1):
    seconds, message = (notes / f"late_{rank}").read_text().split(" s: ", 1)
    assert SHORT_S <= float(seconds) < 3 * SHORT_S
    for words in [
      'ep_combine(layer "moe_3")',
      "rank 0 (process 0), rank 1 (process 1), rank 2 (process 2) waited"
      f" timeout_s = {SHORT_S:g} s for rank 3 (process 3) whose last op was"
      ' ep_dispatch(layer "moe_3")',
    ]:
      assert words in message


# --- The program of a rank ---------------------------------------------------


def run_ops(layer, ops, x):
  """Runs ops on a dict of arrays; each op adds its results."""
  for op in ops:
    if op == "prepare":
      x |= dict(handle=ep.ep_prepare(layer, x["topk_idx"], x["weights"]))
    elif op == "dispatch":
      rows, gates = ep.ep_dispatch(x["handle"], x["tokens"], x["weights"])
      x |= dict(rows=rows, gates=gates)
    else:
      x |= dict(out=ep.ep_combine(x["handle"], x["rows"], x["gates"]))
  return x


def parts(where):
  """Returns lists of ops, one per program: before, at and after a place."""
  if where == "finalize":
    return [OPS[:1]]
  if where not in OPS:
    return [OPS]
  at = OPS.index(where)
  return [part for part in (OPS[:at], [where], OPS[at + 1 : at + 2]) if part]


class Work:
  """Runs steps of the ops in a group, as one program or several.

  `ep_prepare` has an XLA collective that runs only if a rank overflows. No rank
  does, so an error of the native op comes first.
  """

  def __init__(self, group, parts):
    narrow = dict(overflow="drop", drop_by="fair", recv_capacity_per_rank=29)
    self.case = Case(ep.EpLayerConfig(group, name="moe_3", **narrow))
    self.tokens, self.weights = self.case.tokens(), self.case.weights()
    arrays = dict(
      topk_idx=self.case.topk_idx, tokens=self.tokens, weights=self.weights
    )
    self.inputs = {name: self.case.put(x) for name, x in arrays.items()}
    self.programs = {  # keyed by the first op
      part[0]: jax.jit(functools.partial(run_ops, self.case.layer, part))
      for part in parts
    }

  def step(self):
    """Runs a step in which no rank fails."""
    x = self.inputs
    for program in self.programs.values():
      x = program(x)
    self.check(jax.block_until_ready(x))

  def check(self, x):
    """Checks that each choice returned its token, times its weight."""
    if "out" in x:
      expected = np.zeros_like(self.tokens)
      for weight in self.weights.T:
        expected += weight[:, None] * self.tokens
      assert_shards_equal(x["out"], expected)


class FaultyRank(Rank):
  """A rank of a job in which ranks die, perhaps this one."""

  def __init__(self, notes):
    super().__init__(notes)
    self.alive = list(range(jax.process_count()))
    self.round = 0
    self.death = None

  def run_round(self, death):
    """Runs steps until a rank dies, and notes this rank's error and time."""
    self.death = death
    before = descriptors()
    text = ""
    try:
      self.work()
    except ep.EpError as error:
      text = f"{time.monotonic()} {error}"
    self.note(f"error_{self.round}_{self.index}", text)
    self.wait_until(lambda: gc.collect() or descriptors() == before)
    self.alive.remove(death.rank)
    self.round += 1

  def work(self):
    """Runs steps in a new group until an op fails or this rank dies."""
    with self.bootstrap(LONG_S) as group:
      where, when = self.death.where, self.death.when
      work = Work(group, parts(where))
      work.step()
      if where == "finalize" and self.is_victim():
        if when == "before":
          self.wait_for(f"error_{self.round}_*", len(self.alive) - 1)
        else:
          ep.ep_finalize(group)
        self.die()
      if where == "finalize" and when == "before":
        return
      if where == "finalize":
        self.wait_for(f"died_{self.round}")
      if where.endswith("ms") and self.is_victim():
        seconds = float(where.removesuffix("ms")) / 1e3
        threading.Timer(seconds, self.die).start()
      while True:
        self.step(work)

  def bootstrap(self, timeout_s):
    """Returns a group of the living ranks."""
    devices = [d for d in jax.devices() if d.process_index in self.alive]
    mesh = jax.make_mesh(
      (len(devices),),
      ("ep",),
      axis_types=(jax.sharding.AxisType.Auto,),
      devices=devices,
    )
    create, at = ffi.create_host_group, ("bootstrap", "during")
    ffi.create_host_group = lambda **args: self.die_at(*at) or create(**args)
    try:
      # Every possible number of living ranks divides 12 experts.
      name = f"round_{self.round}"
      return bootstrap(mesh, num_experts=12, timeout_s=timeout_s, name=name)
    finally:
      ffi.create_host_group = create

  def step(self, work):
    """Runs a step in which the victim may die."""
    work.check(self.run(work, work.programs))

  def run(self, work, ops):
    x = work.inputs
    for op in ops:
      self.die_at(op, "before")
      self.die_at(op, "during")
      if (self.death.where, self.death.when) == (op, "posted"):
        self.post_alone(work.programs[op], x)
      x = jax.block_until_ready(work.programs[op](x))
    return x

  def is_victim(self):
    return self.death.rank == self.index

  def die_at(self, where, when):
    """Kills the victim if this is the place and moment of its death.

    The victim waits until the other ranks have noted that they are ready.
    """
    if (where, when) != (self.death.where, self.death.when):
      return
    if not self.is_victim():
      return self.note(f"ready_{self.round}_{self.index}")
    self.wait_for(f"ready_{self.round}_*", len(self.alive) - 1)
    if when == "during":
      time.sleep(0.3)  # Now the others wait for this rank.
    self.die()

  def post_alone(self, program, x):
    """Kills the victim while it waits in a program that no other rank called.

    The program runs on another thread, because only the main thread can exit.
    """
    if not self.is_victim():
      return self.wait_for(f"died_{self.round}")
    threading.Thread(target=program, args=(x,), daemon=True).start()
    time.sleep(0.3)
    self.die()

  def die(self):
    self.note(f"died_{self.round}", f"{time.monotonic()}")
    if self.death.way == "exit":
      sys.exit()
    signal.raise_signal(getattr(signal, f"SIG{self.death.way.upper()}"))

  def run_rounds_of_stop(self, death):
    """Runs steps while the victim stops briefly, and then past the timeout."""
    self.death = death
    self.note(f"pid_{self.index}", str(os.getpid()))

    def wake(seconds, notes, count):
      self.wait_for(notes, count)
      time.sleep(seconds)
      pid = int((self.notes / f"pid_{self.death.rank}").read_text())
      os.kill(pid, signal.SIGCONT)

    with self.bootstrap(SHORT_S) as group:
      work = Work(group, parts(death.where))
      late = 0, "late_*", len(self.alive) - 1
      for args in [(SHORT_S / 2, "died_0", 1), late]:
        if self.index == 0:
          threading.Thread(target=wake, args=args).start()
        if self.round == 0:
          self.step(work)
        else:
          start = time.monotonic()
          try:
            self.run(work, [*work.programs][:2])
            # The stopped rank may find all rows that the other ranks sent.
            assert self.is_victim()
          except ep.EpError as error:
            seconds = time.monotonic() - start
            self.note(f"late_{self.index}", f"{seconds:.2f} s: {error}")
        self.round += 1
      for _ in range(3):
        work.step()


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


def main(notes, *deaths):
  rank = FaultyRank(notes)
  for death in map(Death.parse, deaths):
    if death.way == "stop":
      rank.run_rounds_of_stop(death)
    else:
      rank.run_round(death)
  rank.note(f"rank_{rank.index}")
  rank.leave(len(rank.alive))


if __name__ == "__main__":
  main(*sys.argv[1:])
