# SPDX-License-Identifier: Apache-2.0
"""Ranks that die, and what the others see of it.

A death is said as in "3 kill dispatch during": who, in which way, where, and
when. In a world of four ranks up to three die. Each time the others are told,
finalize their group, and go on in a new one of their own. Where:

    an op       before: it has completed the op before
                during: all others wait for it in the op
                posted: it has called the op, and no other has
                after: all have completed it
    bootstrap   before: all others wait for it in ep_bootstrap
                during: it has met them, but is not connected
    finalize    before: the others finalize, and it never does
                after: the others work on when it has
    7ms         somewhere in a program of all ops, as that takes time
"""

import concurrent.futures
import dataclasses
import itertools
import os
import pathlib
import random
import re

import pytest

from worlds import RANKS, run_world

AT_ONCE_S = 5.0
LONG_S = 50.0  # timeout_s, where it must not be waited for
SHORT_S = 3.0  # where it is what is tested

PROGRAM = pathlib.Path(__file__).with_name("death_ranks.py")

OPS = ["prepare", "dispatch", "combine", "combine_bwd", "dispatch_bwd"]
WAYS = ["kill", "segv", "exit"]

pytestmark = pytest.mark.skipif(
  os.environ.get("EP_TEST_BACKEND") == "xla",
  reason="xla: peers are not watched",
)


@dataclasses.dataclass(frozen=True)
class Death:
  rank: int
  way: str
  where: str
  when: str = ""

  @classmethod
  def parse(cls, text):
    rank, *others = text.split()
    return cls(int(rank), *others)

  def __str__(self):
    return " ".join(map(str, dataclasses.astuple(self))).strip()

  @property
  def ops(self):
    """Those in which the others may be told, as they are called in messages."""
    if self.where == "bootstrap":
      return ["ep_bootstrap"]
    if self.where not in OPS:
      return ["ep_prepare"] if self.where == "finalize" else ["ep_"]
    at = OPS.index(self.where)
    this, next = OPS[at], OPS[(at + 1) % len(OPS)]
    told_in = {"posted": [this, next], "after": [next]}.get(self.when, [this])
    return [f'ep_{op}(layer "moe_3")' for op in told_in]


def some_deaths():
  """A few, of every way, op and moment."""
  yield (
    "3 kill prepare during",
    "2 segv dispatch posted",
    "1 exit combine during",
  )
  yield "0 exit bootstrap before", "3 kill bootstrap during", "1 segv 5ms"
  yield (
    "1 segv finalize before",
    "3 exit finalize after",
    "0 kill dispatch_bwd after",
  )


def all_deaths():
  """Each way, everywhere and at every time, on ranks in any order."""
  places = [*itertools.product(OPS, ["before", "during", "posted"])]
  places += [(OPS[-1], "after")]  # of the others, as before the next
  places += itertools.product(["bootstrap"], ["before", "during"])
  places += itertools.product(["finalize"], ["before", "after"])
  return deal(itertools.product(WAYS, places), random.Random(0))


def random_deaths(worlds):
  rng = random.Random(worlds)
  moments = ((way, (f"{rng.uniform(0, 40):.1f}ms",)) for way in WAYS * worlds)
  return deal(moments, rng)


def deal(deaths, rng):
  """Three deaths to a world, of different ranks."""
  deaths = iter(deaths)
  while some := [*itertools.islice(deaths, RANKS - 1)]:
    ranks = rng.sample(range(RANKS), len(some))
    yield tuple(
      str(Death(rank, way, *place))
      for rank, (way, place) in zip(ranks, some, strict=True)
    )


def pytest_generate_tests(metafunc):
  if "deaths" in metafunc.fixturenames:
    deaths = [*some_deaths()]
    if metafunc.config.getoption("all_deaths"):
      deaths = [*all_deaths()]
    deaths += random_deaths(metafunc.config.getoption("random_deaths"))
    metafunc.parametrize("deaths", deaths, ids=", ".join)


def test_survivors_are_told(tmp_path, deaths):
  live_through(tmp_path, deaths)


def test_two_jobs_do_not_meet(tmp_path):
  """Of the same groups, at the same time."""
  jobs = [
    ["0 kill combine_bwd before", "3 exit dispatch_bwd posted"],
    ["2 exit 10ms", "1 segv combine posted"],
  ]
  folders = [tmp_path / "one", tmp_path / "other"]
  for folder in folders:
    folder.mkdir()
  with concurrent.futures.ThreadPoolExecutor() as pool:
    list(pool.map(live_through, folders, jobs))


def live_through(notes, deaths):
  shared_memory = set(os.listdir("/dev/shm"))
  said = run_world(PROGRAM, notes, *deaths)
  alive = set(range(RANKS))
  slowest = 0.0
  for round, death in enumerate(map(Death.parse, deaths)):
    alive.remove(death.rank)
    died = notes / f"died_{round}"
    for rank in alive:
      told = (notes / f"told_{round}_{rank}").read_text()
      if (death.where, death.when) == ("finalize", "before"):
        assert not told
        continue
      at, message = told.split(" ", 1)
      slowest = max(slowest, float(at) - float(died.read_text()))
      assert re.search(rf"\bprocess {death.rank}\b", message), message
      assert any(op in message for op in death.ops), message
  assert slowest < AT_ONCE_S
  assert said.keys() == alive
  assert set(os.listdir("/dev/shm")) <= shared_memory
  print(f"told within {slowest:.2f} s")


def test_a_rank_that_stops(tmp_path):
  """Is not noticed if it goes on in time, and named if it does not."""
  said = run_world(PROGRAM, tmp_path, "stop")
  assert said.keys() == set(range(RANKS))
  for rank in range(RANKS - 1):
    seconds, message = said[rank].split(" s: ", 1)
    assert SHORT_S <= float(seconds) < 3 * SHORT_S
    for words in [
      'ep_combine(layer "moe_3")',
      "rank 0 (process 0), rank 1 (process 1), rank 2 (process 2) waited"
      f" timeout_s = {SHORT_S:g} s for rank 3 (process 3) whose last op was"
      ' ep_dispatch(layer "moe_3")',
    ]:
      assert words in message
