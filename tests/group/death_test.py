# SPDX-License-Identifier: Apache-2.0
"""If a rank dies, the other ranks get an error soon and can go on without it.

A text such as "3 kill dispatch during" describes a death: the rank, the way,
the op and the moment. All ranks of a job but one die. After each death the
survivors get an error, finalize their group, and go on in a new group. These
are the moments:

    before      the rank has completed the previous op
    during      all other ranks wait for the rank in the op

The C++ tests process_test and stopped_test have ranks that stop or die at other
moments: in a bootstrap, after a post, in ep_finalize. failure_test also runs
deaths, `DEATHS`.
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
import time

import jax
import numpy as np
import pytest

from cases import Case
from conftest import assert_shards_equal
import ep
from groups import BACKEND, bootstrap
from worlds import Rank, run_world

ERROR_WITHIN_S = 5.0  # The limit from a death to its error.
LONG_S = 50.0  # A timeout_s that no test reaches.

OPS = ["prepare", "dispatch", "combine"]

pytestmark = pytest.mark.skipif(
  BACKEND == "xla", reason="xla: processes do not watch their peers"
)


@dataclasses.dataclass(frozen=True)
class Death:
  """A rank's death, parsed from a text such as "3 kill dispatch during"."""

  rank: int
  way: str
  op: str
  when: str

  @classmethod
  def parse(cls, text):
    rank, *others = text.split()
    return cls(int(rank), *others)


DEATHS = (
  "3 kill prepare during",
  "2 segv dispatch during",
  "1 exit combine before",
)
OF_TWO_JOBS = [("1 segv combine during",), ("0 exit prepare before",)]


def test_two_jobs_do_not_mix(tmp_path):
  """Two jobs may have groups with equal names at the same time."""
  folders = [tmp_path / "one", tmp_path / "other"]
  for folder in folders:
    folder.mkdir()
  with concurrent.futures.ThreadPoolExecutor() as pool:
    list(pool.map(run_deaths, folders, OF_TWO_JOBS))


def run_deaths(notes, deaths):
  run_deadly(__file__, notes, *deaths, processes=1 + len(deaths))
  check_deaths(notes, deaths)


def run_deadly(program, notes, *args, **options):
  """Runs a program, and checks that no shared memory is left."""
  shared_memory = set(os.listdir("/dev/shm"))
  run_world(program, notes, *args, **options)
  assert set(os.listdir("/dev/shm")) <= shared_memory


def check_deaths(notes, deaths):
  """Checks the errors of the survivors of each death."""
  alive = set(range(1 + len(deaths)))
  slowest = 0.0
  for round, death in enumerate(map(Death.parse, deaths)):
    alive.remove(death.rank)
    died_at = float((notes / f"died_{round}").read_text())
    for rank in alive:
      error = (notes / f"error_{round}_{rank}").read_text()
      at, message = error.split(" ", 1)
      slowest = max(slowest, float(at) - died_at)
      assert re.search(rf"\bprocess {death.rank}\b", message), message
      assert f'ep_{death.op}(layer "moe_3")' in message, message
  assert slowest < ERROR_WITHIN_S
  ended = {int(note.name[5:]) for note in notes.glob("rank_*")}
  assert ended == alive


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


def parts(op):
  """Returns lists of ops, one per program: before, at and after an op."""
  at = OPS.index(op)
  return [part for part in (OPS[:at], [op], OPS[at + 1 : at + 2]) if part]


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
  """A rank of a job in which ranks die, and this rank may be one of them."""

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
    with self.bootstrap() as group:
      work = Work(group, parts(self.death.op))
      work.step()
      while True:
        self.step(work)

  def bootstrap(self):
    """Returns a group of the living ranks."""
    devices = [d for d in jax.devices() if d.process_index in self.alive]
    mesh = jax.make_mesh(
      (len(devices),),
      ("ep",),
      axis_types=(jax.sharding.AxisType.Auto,),
      devices=devices,
    )
    # 12 experts can be split evenly over any possible number of living ranks.
    name = f"round_{self.round}"
    return bootstrap(mesh, num_experts=12, timeout_s=LONG_S, name=name)

  def step(self, work):
    """Runs a step in which the victim may die."""
    x = work.inputs
    for op, program in work.programs.items():
      if op == self.death.op:
        self.die_together()
      x = jax.block_until_ready(program(x))
    work.check(x)

  def is_victim(self):
    return self.death.rank == self.index

  def die_together(self):
    """Kills the victim after the other ranks have noted that they are ready."""
    if not self.is_victim():
      return self.note(f"ready_{self.round}_{self.index}")
    self.wait_for(f"ready_{self.round}_*", len(self.alive) - 1)
    if self.death.when == "during":
      time.sleep(0.3)  # Now the others wait for this rank.
    self.die()

  def die(self):
    self.note(f"died_{self.round}", f"{time.monotonic()}")
    if self.death.way == "exit":
      sys.exit()
    signal.raise_signal(getattr(signal, f"SIG{self.death.way.upper()}"))


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
    rank.run_round(death)
  rank.note(f"rank_{rank.index}")
  rank.leave(len(rank.alive))


if __name__ == "__main__":
  main(*sys.argv[1:])
