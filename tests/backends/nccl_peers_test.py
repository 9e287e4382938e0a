# SPDX-License-Identifier: Apache-2.0
"""The processes of simulated GPUs agree on settings, and on missing ranks.

They meet as in `ep_bootstrap`, but connect no GPUs. Waiting ranks ask all other
ranks for their progress, and report the same missing ranks.
"""

import dataclasses
import json
import os
import time

import jax
from jax.experimental import multihost_utils
import pytest

from conftest import make_mesh, refused
from ep._src.backends.nccl import backend as nccl_backend
from ep._src.backends.nccl import environment, installation, peers
from ep._src.backends.nccl.backend import NcclBackend
from ep._src.backends.nccl.peers import describe, Place
from ep._src.base import compat
from ep._src.group import rendezvous
from ep._src.native import ffi
from groups import bootstrap

TIMEOUT_S = 4.0
PROCESSES = [0, 10, 20, 30]


def place(num_ended, text, *, has_begun=False, num_left=0, still_s=9.0):
  return Place(num_ended, has_begun, num_left, still_s, text)


def waits(num_ended, op):
  return place(num_ended, f"is in {op}", has_begun=True, num_left=1)


IDLE = "has enqueued nothing after ep_combine"
BUSY = "has not begun ep_dispatch"
GONE = "which does not answer: it ended, is stopped or cannot run Python"


@pytest.mark.parametrize(
  ("places", "sentence"),
  [
    (
      [waits(41, "b"), waits(40, "a"), waits(40, "a"), place(40, IDLE)],
      f"Missing: rank 3 (process 30), which has ended 40 ops and {IDLE}.",
    ),
    (
      [waits(40, "a"), None, place(40, BUSY, num_left=1), waits(40, "a")],
      f"Missing: rank 1 (process 10), {GONE}; rank 2 (process 20), which has"
      f" ended 40 ops and {BUSY}.",
    ),
    (
      [waits(40, "a"), waits(40, "b"), waits(40, "a"), place(41, IDLE)],
      "No rank is missing, but they are in different ops, as if they ran"
      " different programs: rank 0 (process 0) is in a; rank 1 (process 10) is"
      " in b; rank 2 (process 20) is in a; rank 3 (process 30)"
      f" {IDLE}.",
    ),
    (
      [waits(40, "a")] * 4,
      "No rank is missing, so a kernel, a GPU or a link has failed.",
    ),
  ],
)
def test_the_sentence(places, sentence):
  answers = {rank: p for rank, p in enumerate(places) if p}
  assert describe(answers, PROCESSES) == sentence


def test_the_sentence_names_few_ranks():
  missing = describe({0: waits(40, "a")}, [*range(64)])
  assert missing.count("does not answer") == 8
  assert missing.endswith("; and 55 more.")


def test_ranks_that_wait_name_the_same_ranks():
  """Rank 2 does not answer, and rank 3 waits for no rank.

  Process 0 has ranks 0 and 2, and process 1 has ranks 1 and 3.
  """
  me = jax.process_index()
  if jax.process_count() != 2:
    pytest.skip("this needs the key-value store of two processes")
  begin = time.monotonic()
  heard = {rank: [] for rank in (me, me + 2)}

  def look_of(rank):
    def look(others):
      heard[rank].append(others)
      still_s = time.monotonic() - begin
      if still_s > TIMEOUT_S:
        raise ffi.NativeError("the group was closed")
      here = waits(40, "ep_dispatch") if rank < 2 else place(40, IDLE)
      return here._replace(still_s=still_s)

    return look

  if me == 0:  # The key of domain 10 begins like the key of domain 1.
    decoy = json.dumps(waits(99, "ep_combine"))
    compat.distributed_client().key_value_set("ep/place/test/10/3", decoy)
  lookouts = {
    rank: peers.Lookout("test", 1, rank, [0, 1, 0, 1], TIMEOUT_S, look_of(rank))
    for rank in heard
  }
  if me == 0:
    time.sleep(TIMEOUT_S * 0.4)  # Rank 2 answers once before it stops.
    lookouts[2].stop()
  time.sleep(max(0, begin + TIMEOUT_S * 1.1 - time.monotonic()))
  multihost_utils.sync_global_devices("all have looked")
  for lookout in lookouts.values():
    lookout.stop()
  missing = (
    f"Missing: rank 2 (process 0), {GONE}; rank 3 (process 1), which has ended"
    f" 40 ops and {IDLE}."
  )
  assert heard[me][-1] == missing
  assert heard[me + 2][-1] == ""


# --- Settings that all processes refuse --------------------------------------

LAST = jax.process_count() - 1
IS_ODD = jax.process_index() == LAST
VARIABLES = (
  *environment.REFUSED,
  *environment.AGREED,
  *environment.PASSED_ON,
)


class Agreed(Exception):
  """The processes agreed on a group."""


@pytest.fixture(scope="module")
def config():
  with bootstrap(make_mesh({"ep": jax.device_count()}), backend="xla") as group:
    return dataclasses.replace(group.connection.group, name="of GPUs")


@pytest.fixture
def machine(monkeypatch):
  """Simulates an installed NCCL EP, and an environment without variables."""
  for variable in VARIABLES:
    monkeypatch.delenv(variable, raising=False)
  monkeypatch.setattr(installation, "prepare", lambda _: ("", ""))
  monkeypatch.setattr(ffi, "library", lambda _: None)
  monkeypatch.setattr(ffi, "new_nccl_id", lambda *_: b"an id")
  monkeypatch.setattr(nccl_backend, "_borrow", lambda *_: None)
  for function in ("create_nccl_group", "connect_nccl_group", "close_group"):
    monkeypatch.setattr(ffi, function, lambda *_, **__: None)

  def succeed(_):
    raise Agreed

  monkeypatch.setattr(ffi, "open_nccl_group", succeed)


def meet(config):
  NcclBackend().connect(config, rendezvous.join)


@pytest.mark.parametrize("variable", environment.REFUSED)
def test_a_variable_of_one_process_is_refused(
  machine, config, monkeypatch, variable
):
  if IS_ODD:
    monkeypatch.setenv(variable, "1")
  with refused("ep_bootstrap: ", f"{variable} = 1 ", "; unset it"):
    meet(config)
  monkeypatch.setenv(variable, "OFF" if IS_ODD else "0")
  with pytest.raises(Agreed):
    meet(config)


@pytest.mark.skipif(LAST == 0, reason="needs several processes")
@pytest.mark.parametrize("variable", environment.AGREED)
def test_processes_with_other_values_are_refused(
  machine, config, monkeypatch, variable
):
  default = environment.AGREED[variable]
  if IS_ODD:
    monkeypatch.setenv(variable, "xla")
  with refused(
    f"ep_bootstrap: {variable} = {default} on process 0, but xla on process"
    f" {LAST}; all processes must",
    "same settings",
  ):
    meet(config)
  monkeypatch.setenv(variable, "xla")
  with pytest.raises(Agreed):
    meet(config)


@pytest.mark.parametrize("variable", environment.PASSED_ON)
def test_processes_may_differ_in_other_variables(
  machine, config, monkeypatch, variable
):
  value = str(1 + IS_ODD)
  monkeypatch.setenv(variable, value)
  with pytest.raises(Agreed):
    meet(config)
  assert os.environ[variable] == value


@pytest.mark.parametrize("step", ["prepare", "connect_nccl_group"])
def test_the_refusal_of_one_process_reaches_all_immediately(
  machine, config, monkeypatch, step
):
  """No process enters a collective of NCCL EP, or keeps its group."""
  closed = []

  def refuse(*_, **__):
    raise ffi.NativeError("ep_bootstrap: this GPU lacks something")

  if IS_ODD:
    module = installation if step == "prepare" else ffi
    monkeypatch.setattr(module, step, refuse)
  monkeypatch.setattr(ffi, "close_group", lambda *names: closed.append(names))
  begin = time.monotonic()
  with pytest.raises(RuntimeError, match="this GPU lacks something"):
    meet(dataclasses.replace(config, timeout_s=600.0))
  assert time.monotonic() - begin < 60
  is_made = not IS_ODD or step == "connect_nccl_group"
  assert closed == ([("nccl", config.name)] if is_made else [])
