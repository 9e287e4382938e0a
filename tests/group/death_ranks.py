# SPDX-License-Identifier: Apache-2.0
"""The program of ranks that die; death_test defines the deaths."""

import contextlib
import functools
import gc
import os
import pathlib
import signal
import sys
import threading
import time

from death_test import Death, LONG_S, OPS, SHORT_S
import jax
import numpy as np

from cases import Case
from conftest import assert_alike, assert_shards_equal
import ep
from ep._src.native import ffi
from groups import bootstrap
from worlds import Rank


class Ops:
  """The ops as functions of a step's arrays, to which each adds its results."""

  def __init__(self, layer):
    self.layer = layer

  def prepare(self, x):
    handle = ep.ep_prepare(self.layer, x["topk_idx"], x["weights"])
    return x | dict(handle=handle)

  def dispatch(self, x):
    rows, gates = ep.ep_dispatch(x["handle"], x["tokens"], x["weights"])
    return x | dict(rows=rows, gates=gates)

  def combine(self, x):
    return x | dict(out=ep.ep_combine(x["handle"], x["rows"], x["gates"]))

  def combine_bwd(self, x):
    combine = functools.partial(ep.ep_combine, x["handle"])
    (g_rows,) = jax.vjp(combine, x["rows"])[1](x["tokens"])
    return x | dict(g_rows=g_rows)

  def dispatch_bwd(self, x):
    dispatch = functools.partial(ep.ep_dispatch, x["handle"])
    vjp = jax.vjp(dispatch, x["tokens"], x["weights"])[1]
    g_tokens, g_weights = vjp((x["rows"], x["gates"]))
    return x | dict(g_tokens=g_tokens, g_weights=g_weights)

  def run(self, ops, x):
    for op in ops:
      x = getattr(self, op)(x)
    return x


def parts(where):
  """Returns the ops before a place, at it, and the next; each is a program."""
  if where == "finalize":
    return [OPS[:1]]
  if where not in OPS:
    return [OPS]
  at = OPS.index(where)
  return [part for part in (OPS[:at], [where], OPS[at + 1 : at + 2]) if part]


class Work:
  """Runs steps of every op in a group, as one program or several.

  Its `ep_prepare` has a collective of XLA's, in a step that overflows, which
  none does. An error of the op comes before it.
  """

  def __init__(self, group, parts):
    narrow = dict(overflow="drop", drop_by="fair", recv_capacity_per_rank=29)
    self.case = Case(ep.EpLayerConfig(group, name="moe_3", **narrow))
    self.tokens, self.weights = self.case.tokens(), self.case.weights()
    arrays = dict(
      topk_idx=self.case.topk_idx, tokens=self.tokens, weights=self.weights
    )
    self.inputs = {name: self.case.put(x) for name, x in arrays.items()}
    ops = Ops(self.case.layer)
    self.programs = {  # by their first ops
      part[0]: jax.jit(functools.partial(ops.run, part)) for part in parts
    }

  def step(self):
    """Runs a step in which no rank fails."""
    x = self.inputs
    for program in self.programs.values():
      x = program(x)
    self.check(jax.block_until_ready(x))

  def check(self, x):
    """Checks that each choice of a token returned the token itself."""
    out, g_tokens = np.zeros((2, *self.tokens.shape), np.float32)
    for weight in self.weights.T:
      out += weight[:, None] * self.tokens
      g_tokens += self.tokens
    expected = dict(out=out, g_tokens=g_tokens, g_weights=self.weights)
    for name in expected.keys() & x.keys():
      assert_shards_equal(x[name], expected[name])
    if "g_rows" in x:
      assert_alike(x["rows"], x["g_rows"])


class FaultyRank(Rank):
  """A rank of a world in which ranks die, perhaps this one."""

  def __init__(self, notes):
    super().__init__(notes)
    self.alive = list(range(jax.process_count()))
    self.round = 0
    self.death = None

  def run_round(self, death):
    """Works until the death, and notes which error came and when."""
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
    """Works in a new group until an error comes or this rank has to end."""
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
    """Returns a group of the ranks that are alive."""
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
      # 12 is a multiple of every number of ranks here.
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
    """Ends the victim, if this is the place and moment of its death.

    The other ranks note that they are here, and the victim waits for that.
    """
    if (where, when) != (self.death.where, self.death.when):
      return
    if not self.is_victim():
      return self.note(f"ready_{self.round}_{self.index}")
    self.wait_for(f"ready_{self.round}_*", len(self.alive) - 1)
    if when == "during":
      time.sleep(0.3)  # By then the others wait for this rank.
    self.die()

  def post_alone(self, program, x):
    """Ends the victim while it waits in the program, which no other has called.

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
    """Works until the victim stops, first for a while, then for too long."""
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
            # The victim may find everything that the others sent.
            assert self.is_victim()
          except ep.EpError as error:
            seconds = time.monotonic() - start
            self.note(f"late_{self.index}", f"{seconds:.2f} s: {error}")
        self.round += 1
      for _ in range(3):
        work.step()


def descriptors():
  """Returns how many sockets, pidfds and mappings of ours there are."""
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
