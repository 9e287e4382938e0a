# SPDX-License-Identifier: Apache-2.0
"""If a rank dies, the others get an error at once, and can go on without it.

A text such as "3 kill dispatch during" describes a death: the rank, the way,
the place, and the moment. In a world all ranks but one die. After each death
the others get an error, finalize their group, and go on in a new group of their
own. These are the places and moments:

    an op       before: the rank has completed the previous op
                during: all others wait for the rank in the op
                posted: the rank has called the op, and no other rank has
    bootstrap   during: the rank has exchanged addresses, but has no connection
    finalize    before: the others finalize, and the rank never does
                after: the rank has finalized, and the others go on working
    7ms         that long after a program of all ops began; no "exit", which
                is the main thread's

The way "stop" is no death, and can only come first: the rank stops before an op
twice, and goes on, once in time and once after the others have failed. Deaths
in ops come in the world of failure_test, when all else has failed.
"""

import concurrent.futures
import dataclasses
import os
import pathlib
import re

import pytest

import ep
from worlds import RANKS, run_world

AT_ONCE_S = 5.0  # An error about a death has to come within this time.
LONG_S = 50.0  # This is timeout_s where a test must not wait for it.
SHORT_S = 3.0  # This is timeout_s where a test waits for it.

PROGRAM = pathlib.Path(__file__).with_name("death_ranks.py")

OPS = ["prepare", "dispatch", "combine", "combine_bwd", "dispatch_bwd"]

pytestmark = pytest.mark.skipif(
  os.environ.get("EP_TEST_BACKEND") == "xla",
  reason="xla: peers are not watched",
)


@dataclasses.dataclass(frozen=True)
class Death:
  """The death of one rank, as the text above describes it."""

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
    """Returns the ops that errors of the others may name, as messages do."""
    if self.where == "bootstrap":
      return ["ep_bootstrap"]
    if self.where not in OPS:
      return ["ep_prepare"] if self.where == "finalize" else ["ep_"]
    at = OPS.index(self.where)
    failing = OPS[at : at + 1 + (self.when == "posted")]
    return [f'ep_{op}(layer "moe_3")' for op in failing]


# Deaths of every way, at several places and moments.
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
  """Two jobs can have groups of the same names at the same time."""
  folders = [tmp_path / "one", tmp_path / "other"]
  for folder in folders:
    folder.mkdir()
  with concurrent.futures.ThreadPoolExecutor() as pool:
    list(pool.map(run_deaths, folders, OF_TWO_JOBS))


def run_deaths(notes, deaths):
  run_traced(PROGRAM, notes, *deaths, processes=1 + len(deaths))
  check_deaths(notes, deaths)


def run_traced(program, notes, *args, **options):
  """Runs a world that traces all groups, and leaves no shared memory."""
  shared_memory = set(os.listdir("/dev/shm"))
  env = {"EP_TRACE": str(notes / "traces")}
  run_world(program, notes, *args, **options, env=env)
  assert set(os.listdir("/dev/shm")) <= shared_memory


def check_deaths(notes, deaths):
  """Checks the errors of those that survive the deaths of a world."""
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
    died = notes / f"died_{round}"
    for rank in alive:
      error = (notes / f"error_{round}_{rank}").read_text()
      if (death.where, death.when) == ("finalize", "before"):
        assert not error
        continue
      at, message = error.split(" ", 1)
      slowest = max(slowest, float(at) - float(died.read_text()))
      assert re.search(rf"\bprocess {death.rank}\b", message), message
      assert any(op in message for op in death.ops), message
  assert slowest < AT_ONCE_S
  ended = {int(note.name[5:]) for note in notes.glob("rank_*")}
  assert ended == alive
  print(f"all errors came within {slowest:.2f} s")


def failure(notes, group):
  """Returns what the traces of a group tell about its failure."""
  folder = notes / f"traces_{group}"
  folder.mkdir()
  for part in (notes / "traces").glob(f"{group}[.%]*"):
    part.rename(folder / part.name)
  return ep.explain(folder).failure


def check_stop(notes):
  """Checks that the others fail once, when their time is up."""
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
