# SPDX-License-Identifier: Apache-2.0
"""A rank that never comes, or differs, is an error; so is a missing library.

death_test has ranks that die.
"""

import os
import sys
import time

import pytest

from ep._src import ffi
from worlds import Rank, run_world

# With backend="xla" a rank learns of these failures from bootstrap, from XLA's
# collectives, or never.
only_native = pytest.mark.skipif(
  os.environ.get("EP_TEST_BACKEND") == "xla",
  reason="xla: peers are not watched, and there is no native library",
)

TIMEOUT_S = 4.0  # This is timeout_s where a test waits for it.
LONG_S = 120.0  # This is timeout_s where a test must not wait for it.


@only_native
def test_a_rank_that_never_comes(tmp_path):
  """The others fail when the time is up, and their errors name the rank."""
  notes = run_world(__file__, tmp_path, "absent")
  assert notes.keys() == {0, 1, 2}
  for note in notes.values():
    seconds, message = note.split(" s: ", 1)
    assert TIMEOUT_S <= float(seconds) < 3 * TIMEOUT_S
    for word in ["ep_prepare", '"moe_3"', "rank 3", "timeout_s"]:
      assert word in message


def test_a_rank_that_does_not_bootstrap(tmp_path):
  notes = run_world(__file__, tmp_path, "no_bootstrap")
  assert notes.keys() == {0, 1, 2}
  for note in notes.values():
    for word in ["ep_bootstrap", "process 3", "timeout_s"]:
      assert word in note


def test_ranks_that_bootstrap_differently(tmp_path):
  notes = run_world(__file__, tmp_path, "other_config")
  assert notes.keys() == {0, 1, 2, 3}
  for note in notes.values():
    for word in ["ep_bootstrap", "hidden_dim", "7", "8"]:
      assert word in note


@only_native
def test_ranks_that_run_different_layers(tmp_path):
  notes = run_world(__file__, tmp_path, "other_layer")
  assert notes.keys() == {0, 1, 2, 3}
  for note in notes.values():
    for word in ["ep_prepare", '"moe_3"']:
      assert word in note


@only_native
def test_no_library(tmp_path):
  """The message names the three places where it is looked for."""
  (note,) = run_world(
    __file__,
    tmp_path,
    "no_library",
    processes=1,
    env={"EP_FFI_LIBRARY_PATH": str(tmp_path / "nowhere.so")},
  ).values()
  for word in [
    "EP_FFI_LIBRARY_PATH",
    "nowhere.so",
    "runfiles",
    "package",
    "libep_ffi",
  ]:
    assert word in note


@only_native
@pytest.mark.parametrize(
  "old, new",
  [
    (ffi.INTERFACE.encode(), b"0123456789ab"),
    (b"ep_interface\0", b"ep_interfere\0"),  # The library has no such function.
  ],
  ids=["stale", "older"],
)
def test_a_library_of_another_version(tmp_path, old, new):
  """The library is not called; the message names both and says what to do."""
  native = ffi.find_library("host").read_bytes()
  assert old in native
  library = tmp_path / "libep_ffi_cpu.so"
  library.write_bytes(native.replace(old, new))
  (note,) = run_world(
    __file__,
    tmp_path,
    "no_library",
    processes=1,
    env={"EP_FFI_LIBRARY_PATH": str(library)},
  ).values()
  for word in [
    str(library),
    "0123456789ab" if new.isalnum() else "none",
    ffi.INTERFACE,
    "EP_FFI_LIBRARY_PATH",
    "//ep_ffi:libep_ffi_cpu.so",
  ]:
    assert word in note


@only_native
def test_no_library_on_one_rank(tmp_path):
  """The error reaches the other ranks, and they do not wait for that rank."""
  notes = run_world(__file__, tmp_path, "no_library_on_one")
  assert notes.keys() == {0, 1, 2, 3}
  for note in notes.values():
    seconds, message = note.split(" s: ", 1)
    assert float(seconds) < LONG_S / 10
    assert "nowhere.so" in message


# --- The program of a rank ---------------------------------------------------


class Scenarios(Rank):
  """A rank that has a method for each scenario."""

  def bootstrap(self, **options):
    import jax

    from conftest import make_mesh
    from groups import bootstrap

    return bootstrap(make_mesh({"ep": jax.device_count()}), **options)

  def absent(self):
    group = self.bootstrap(timeout_s=TIMEOUT_S)
    if self.index == 3:
      self.wait_for("rank_*", 3)
    else:
      # The native op is the first of its collectives.
      self.note_error(
        lambda: self.prepare(
          group,
          overflow="drop",
          drop_by="weight",
          recv_capacity_per_rank=8,
        )
      )

  def no_bootstrap(self):
    if self.index == 3:
      self.wait_for("rank_*", 3)
    else:
      self.note_error(lambda: self.bootstrap(timeout_s=TIMEOUT_S))

  def other_config(self):
    hidden_dim = 8 if self.index == 3 else 7
    self.note_error(
      lambda: self.bootstrap(timeout_s=TIMEOUT_S, hidden_dim=hidden_dim)
    )

  def other_layer(self):
    group = self.bootstrap(timeout_s=TIMEOUT_S)
    alignment = 4 if self.index == 3 else 1
    self.note_error(lambda: self.prepare(group, alignment=alignment))

  def no_library(self):
    self.note_error(self.bootstrap)

  def no_library_on_one(self):
    if self.index == 3:
      os.environ["EP_FFI_LIBRARY_PATH"] = "nowhere.so"
    self.note_error(lambda: self.bootstrap(timeout_s=LONG_S))

  def prepare(self, group, **options):
    from cases import Case
    import ep
    from ops import sizes

    config = ep.EpLayerConfig(group, name="moe_3", **options)
    weights = Case(config).weights()
    return Case(config, routing_weights=weights).run(sizes)

  def note_error(self, fn):
    """Notes how long `fn` and its results took to fail, and how they did."""
    import jax

    start = time.monotonic()
    try:
      jax.block_until_ready(fn())
    except (RuntimeError, ValueError, OSError) as error:
      seconds = time.monotonic() - start
      self.note(f"rank_{self.index}", f"{seconds:.2f} s: {error}")
    else:
      raise AssertionError("no error came")


def main(notes, scenario):
  rank = Scenarios(notes)
  getattr(rank, scenario)()
  rank.leave(int(os.environ["JAX_NUM_PROCESSES"]))


if __name__ == "__main__":
  main(*sys.argv[1:])
