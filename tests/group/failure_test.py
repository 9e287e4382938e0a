# SPDX-License-Identifier: Apache-2.0
"""Tests that a missing rank and a missing native library are errors.

death_test has ranks that die, and mismatch_test ranks whose programs differ.
"""

import contextlib
import os
import sys
import time

import death_test
from death_test import check_deaths, DEATHS, run_deadly
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from cases import Case
from conftest import make_mesh, to_global
import ep
from ep._src.native import ffi
from groups import BACKEND, bootstrap, MESHES, spec
from op_functions import sizes
from worlds import Rank, RANKS, run_world

pytestmark = pytest.mark.skipif(
  BACKEND == "xla",
  reason="xla: processes do not watch their peers, and load no native library",
)

TIMEOUT_S = 3.0  # A timeout_s that scenarios reach.
EXIT_S = 2.0  # An exit_after_s that scenarios reach.
LONG_S = 120.0  # A timeout_s that no scenario reaches.


@pytest.fixture(scope="module")
def notes(tmp_path_factory):
  """Runs four ranks through several failures; returns the folder of notes."""
  notes = tmp_path_factory.mktemp("notes")
  run_deadly(__file__, notes, "one_after_another", *DEATHS)
  return notes


def notes_of_errors(notes, name, ranks):
  """Yields (seconds until the error, error message) for each noted rank."""
  texts = {note.name: note.read_text() for note in notes.glob(f"{name}_*")}
  assert texts.keys() == {f"{name}_{rank}" for rank in ranks}
  for text in texts.values():
    seconds, message = text.split(" s: ", 1)
    yield float(seconds), message


def test_a_process_that_goes_on_after_a_failure_is_not_terminated(notes):
  assert len([*notes.glob("went_on_*")]) == RANKS


def test_if_a_rank_has_no_library_all_ranks_raise_its_error_soon(notes):
  for seconds, message in notes_of_errors(notes, "library", range(RANKS)):
    assert seconds < LONG_S / 10
    assert "nowhere.so" in message


def test_a_rank_that_never_arrives_at_an_op(notes):
  """The other ranks fail after timeout_s; one of these ranks warns earlier."""
  for seconds, message in notes_of_errors(notes, "alone", range(3)):
    assert TIMEOUT_S <= seconds < 3 * TIMEOUT_S
    for word in ["ep_prepare", '"moe_5"', "rank 3", "timeout_s"]:
      assert word in message
  logs = [log.read_text() for log in (notes / "logs").glob("rank_*.log")]
  lines = [[x for x in log.splitlines() if "moe_5" in x] for log in logs]
  (warned,) = [x for x in lines if "a third of timeout_s" in str(x)]
  first, *others = warned
  assert "waited a third of timeout_s" in first
  assert "waited timeout_s" in str(others) and "a third" not in str(others)


def test_a_rank_that_is_late_for_bootstrap(notes):
  for _, message in notes_of_errors(notes, "lost", range(RANKS)):
    for word in ["ep_bootstrap", "process 3", "timeout_s"]:
      assert word in message


def test_survivors_of_deaths_get_an_error(notes):
  check_deaths(notes, DEATHS)


def refusal(monkeypatch, library):
  """Returns the error of a bootstrap with `library` as the native library."""
  monkeypatch.setenv("EP_FFI_LIBRARY_PATH", str(library))
  with pytest.raises((RuntimeError, OSError)) as error:
    bootstrap(make_mesh({"ep": 1}))
  return str(error.value)


def test_no_library(tmp_path, monkeypatch):
  """The error names cures, and the places where ep looks for the library."""
  message = refusal(monkeypatch, tmp_path / "nowhere.so")
  places = ["EP_FFI_LIBRARY_PATH", "nowhere.so", "runfiles", "package"]
  for word in [*places, "//ep_ffi:libep_ffi_cpu.so", 'backend="xla"']:
    assert word in message


def test_a_library_of_another_name(tmp_path, monkeypatch):
  library = tmp_path / "mine.so"
  library.touch()
  message = refusal(monkeypatch, library)
  assert f"{library}, but the library of backend 'host' has the name" in message


@pytest.mark.parametrize("age", ["stale", "older"])
def test_a_library_of_another_version(tmp_path, monkeypatch, age):
  """The error names both versions and a cure; ep does not call the library."""
  found = f"the library is {ffi.INTERFACE_VERSION}."
  native = ffi.find_library("host").read_bytes()
  if age == "older":  # An older library lacks the function.
    found = "none"
    assert b"ep_interface_version\0" in native
    native = native.replace(b"ep_interface_version", b"ep_interfere_version")
  library = tmp_path / "libep_ffi_cpu.so"
  library.write_bytes(native)
  monkeypatch.setattr(ffi, "INTERFACE_VERSION", 999)
  message = refusal(monkeypatch, library)
  for word in [
    str(library),
    found,
    "calls the interface 999",
    "EP_FFI_LIBRARY_PATH",
    "//ep_ffi:libep_ffi_cpu.so",
  ]:
    assert word in message


@pytest.mark.parametrize("processes", [1, 2])
def test_a_rank_that_waits_in_a_psum(tmp_path, capfd, processes):
  """Python raises no error in a psum, but the process terminates and says why.

  The ranks that fail are in another process, or in this one.
  """
  options = dict(processes=processes, devices=RANKS // processes)
  notes = run_world(__file__, tmp_path, "psum", **options)
  stuck = processes - 1
  assert notes.keys() == {*range(stuck)}
  words = 'ep_prepare(layer "moe_3"): rank 0 needs 10 receive rows'
  for note in notes.values():
    assert words in note
  assert f"rank {stuck} failed with exit code 70" in capfd.readouterr().out
  log = (tmp_path / f"logs/rank_{stuck}.log").read_text()
  first, last = log.split("ep_ffi: ")[1:]
  assert first.startswith(words)
  for word in [f"process {stuck} ends", f"exit_after_s = {EXIT_S:g} s", words]:
    assert word in last


# --- The program of a rank ---------------------------------------------------


class Scenarios(Rank):
  """A rank, with a method for each scenario."""

  def bootstrap(self, **options):
    return bootstrap(make_mesh({"ep": jax.device_count()}), **options)

  def one_after_another(self, *deaths):
    with pytest.MonkeyPatch.context() as patch:
      if self.index == 3:
        patch.setenv("EP_FFI_LIBRARY_PATH", "nowhere.so")
      self.note_error("library", lambda: self.bootstrap(timeout_s=LONG_S))
    self.goes_on()
    group = self.bootstrap(timeout_s=TIMEOUT_S)
    if self.index == 3:
      self.wait_for("lost_*", 3)
    else:
      # With these options, no XLA collective precedes the native op.
      options = dict(drop_by="fair", recv_capacity_per_rank=8)
      self.note_error("alone", lambda: self.prepare(group, **options))
    self.note_error("lost", lambda: self.bootstrap(timeout_s=TIMEOUT_S))
    with contextlib.suppress(ep.EpError):
      ep.ep_finalize(group)
    death_test.main(self.notes, *deaths)

  def psum(self):
    """Makes ep_prepare fail in domain 0 after it has succeeded in domain 1."""
    mesh = make_mesh(MESHES["dp2_ep2"])
    options = dict(exit_after_s=EXIT_S, timeout_s=LONG_S)
    group = bootstrap(mesh, top_k=1, **options)
    layer = ep.EpLayerConfig(group, name="moe_3", recv_capacity_per_rank=8)

    def before(domain):
      if domain == 0:
        self.wait_for("past_*", 2)
      return np.asarray(domain)

    def after(domain, rank, rows):
      if domain == 1:
        self.note(f"past_{rank}")
      return np.asarray(rows)

    def step():
      scalar = jax.ShapeDtypeStruct((), np.int32)
      domain, rank = lax.axis_index("dp"), lax.axis_index("ep")
      domain = jax.pure_callback(before, scalar, domain)
      # In domain 0 all tokens choose expert 0; in domain 1 they choose none.
      handle = ep.ep_prepare(layer, jnp.full((5, 1), -domain))
      rows = handle.total_recv_tokens.sum()
      rows = jax.pure_callback(after, scalar, domain, rank, rows)
      return lax.psum(rows, ("dp", "ep"))

    specs = dict(in_specs=(), out_specs=PartitionSpec())
    self.note_error("rank", jax.jit(jax.shard_map(step, mesh=mesh, **specs)))
    ep.ep_finalize(group)
    logs = self.notes.glob("logs/rank_*.log")
    others = [log for log in logs if log.stem != f"rank_{self.index}"]
    self.wait_until(
      lambda: any("exit_after_s" in log.read_text() for log in others)
    )
    os._exit(0)

  def goes_on(self):
    group = self.bootstrap(top_k=1, exit_after_s=EXIT_S)
    layer = ep.EpLayerConfig(group, recv_capacity_per_rank=8)
    program = jax.jit(lambda idx: ep.ep_prepare(layer, idx).total_recv_tokens)

    def run(expert):
      idx = np.full((20, 1), expert, np.int32)
      idx = to_global(idx, group.mesh, spec(layer))
      jax.block_until_ready(program(idx))

    run(-1)
    with pytest.raises(ep.EpError, match="20 receive rows"):
      run(0)
    run(-1)
    time.sleep(2 * EXIT_S)
    run(-1)
    self.note(f"went_on_{self.index}")

  def prepare(self, group, **options):
    config = ep.EpLayerConfig(group, name="moe_5", overflow="drop", **options)
    weights = Case(config).weights()
    return Case(config, routing_weights=weights).run(sizes)

  def note_error(self, name, fn):
    """Notes the error of `fn` or of its results, and its delay."""
    start = time.monotonic()
    try:
      jax.block_until_ready(fn())
    except (RuntimeError, ValueError, OSError) as error:
      seconds = time.monotonic() - start
      self.note(f"{name}_{self.index}", f"{seconds:.2f} s: {error}")
    else:
      raise AssertionError("no error came")


def main(notes, scenario, *args):
  rank = Scenarios(notes)
  getattr(rank, scenario)(*args)
  rank.leave(int(os.environ["JAX_NUM_PROCESSES"]))


if __name__ == "__main__":
  main(*sys.argv[1:])
