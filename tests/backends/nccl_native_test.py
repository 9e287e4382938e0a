# SPDX-License-Identifier: Apache-2.0
"""Tests the Python bindings of libep_ffi_cuda.so, which calls a fake NCCL."""

from concurrent import futures
import ctypes
import math
import os
import pathlib
import shutil
import types

import pytest

from ep._src.native import ffi
import programs

pytestmark = pytest.mark.skipif(
  "FAKE_NCCL" not in os.environ, reason="this needs libraries that Bazel builds"
)

SIZES = dict(
  num_experts=8,
  ep_size=2,
  max_tokens=16,
  capacity=64,
  max_row_bytes=256,
  max_num_sms=0,
  timeout_s=20.0,
  exit_after_s=math.inf,
)


@pytest.fixture(scope="module", autouse=True)
def fake():
  """Loads fakes of CUDA, NCCL and NCCL EP, which the backend then uses."""
  ctypes.CDLL(os.environ["FAKE_NCCL"], ctypes.RTLD_GLOBAL)


def on_ranks(count, function):
  """Calls `function(rank)` on one thread per rank, all in this process."""
  with futures.ThreadPoolExecutor(count) as threads:
    list(threads.map(function, range(count)))


def create_group(name, ranks, **changes):
  """Creates a group of one domain; `changes` are of SIZES."""
  values = SIZES | changes
  of_call = "max_tokens", "capacity", "max_row_bytes"
  sizes = {size: values.pop(size) for size in of_call}
  group = types.SimpleNamespace(name=name, program_text="", **values)
  ffi.create_nccl_group(group, ranks, domain=0, nccl="", nccl_ep="", **sizes)


def connect(names, num_hosts=1, **sizes):
  unique_id = ffi.new_nccl_id("", "")

  def create(rank):
    create_group(name=names[rank], ranks={rank: rank}, **sizes)
    ffi.connect_nccl_group(names[rank], unique_id, num_hosts)

  on_ranks(len(names), create)
  on_ranks(len(names), lambda rank: ffi.open_nccl_group(names[rank]))


def close(names):
  on_ranks(len(names), lambda rank: ffi.close_group("nccl", names[rank]))


def test_a_group_can_be_created_used_and_closed():
  names = ["rank0", "rank1"]
  connect(names)
  try:
    for name in names:
      ffi.check_group("nccl", name)
      few, many = (
        ffi.mem_bytes("nccl", name, num_tokens, 2, 1, 64)
        for num_tokens in (8, 16)
      )
      assert 0 < few < many
  finally:
    close(names)
  with pytest.raises(ffi.NativeError, match='"rank0"'):
    ffi.check_group("nccl", "rank0")


def test_a_group_without_an_id_waits_for_a_communicator():
  create_group(name="waits", ranks={0: 0, 1: 1})
  for use in (
    lambda: ffi.connect_nccl_group("waits", b"", 1),
    lambda: ffi.open_nccl_group("waits"),
    lambda: ffi.mem_bytes("nccl", "waits", 8, 2, 1, 64),
  ):
    with pytest.raises(ffi.NativeError, match="is not connected yet"):
      use()
  ffi.close_group("nccl", "waits")
  with pytest.raises(ffi.NativeError, match="the group was closed"):
    ffi.open_nccl_group("waits")


def test_the_watchdog_reports_the_progress_of_a_rank():
  """Until the group closes, the watchdog accepts other ranks' progress."""
  names = ["place0", "place1"]
  connect(names)
  *numbers, still_s, text = ffi.nccl_place("place0", 0, 'of "others"')
  assert (numbers, text) == ([0, False, 0], "has enqueued no op")
  assert ffi.nccl_place("place0", 0, "")[3] > still_s >= 0
  close(names)
  with pytest.raises(ffi.NativeError, match="closed"):
    ffi.nccl_place("place0", 0, "")


def error_in_a_new_process(libraries, *files, private=""):
  """Loads `files` in a new process; returns the error of `new_nccl_id`.

  Loads the file `private` outside of the process's global scope.
  """
  program = """
import ctypes, sys
from ep._src.native import ffi
nccl, nccl_ep, private, *files = sys.argv[1:]
private = private and ctypes.CDLL(private)
for file in files:
  ctypes.CDLL(file, ctypes.RTLD_GLOBAL)
try:
  ffi.new_nccl_id(nccl, nccl_ep)
except ffi.NativeError as e:
  print(e)
"""
  code, output = programs.run("-c", program, *libraries, private, *files)
  assert code == 0, output
  return output


def test_two_nccls_are_refused(tmp_path):
  files = [tmp_path / folder / "libnccl.so.2" for folder in ("a", "b")]
  for file in files:
    file.parent.mkdir()
    shutil.copy(os.environ["FAKE_NCCL"], file)
  message = error_in_a_new_process(["", ""], *files)
  for word in ["2 NCCLs", *map(str, files)]:
    assert word in message


def copy_of_the_fake(folder, soname=b"libnccl_ep.so.0"):
  folder.mkdir()
  contents = pathlib.Path(os.environ["FAKE_NCCL"]).read_bytes()
  file = folder / "libnccl_ep.so"
  file.write_bytes(contents.replace(b"libnccl_ep.so.0", soname))
  return file


def test_a_neighbour_may_load_another_nccl_ep(tmp_path):
  """TransformerEngine loads another file with the same SONAME privately."""
  ours, theirs = (copy_of_the_fake(tmp_path / name) for name in ("a", "b"))
  assert not error_in_a_new_process(["", ours], ours, private=theirs)


def test_another_nccl_ep_in_the_global_scope_is_refused(tmp_path):
  """The functions of `ours` would call functions of `theirs`."""
  ours, theirs = (copy_of_the_fake(tmp_path / name) for name in ("a", "b"))
  message = error_in_a_new_process(["", ours], theirs)
  for word in ["ncclEp", str(ours), str(theirs), "RTLD_GLOBAL"]:
    assert word in message


def test_another_soname_of_nccl_ep_is_refused(tmp_path):
  other = copy_of_the_fake(tmp_path / "a", b"libnccl_ep.so.1")
  message = error_in_a_new_process(["", other], other)
  for word in [f"{other} is libnccl_ep.so.1", "nccl-extensions==0.1.0"]:
    assert word in message


def test_a_missing_library_is_named():
  """The error names the missing library: CUDA's driver or NCCL."""
  libraries = ["/nowhere/libnccl.so.2", "/nowhere/libnccl_ep.so"]
  message = error_in_a_new_process(libraries)
  assert "cannot load" in message
  assert "docs/gpu.md" in message


def test_sizes_are_passed_in_order():
  """For each wrong size, the error names that size and not another one."""
  for sizes, word in [
    (dict(num_experts=4096), "num_experts = 4096"),
    (dict(ep_size=1), "ep_size = 1"),
    (dict(max_tokens=100), "max_tokens_per_rank, rounded up to 100"),
    (dict(capacity=15), "recv_capacity_per_rank = 15"),
    (dict(max_row_bytes=8), "8 bytes"),
    (dict(max_num_sms=17), "max_num_sms = 17"),
  ]:
    with pytest.raises(ValueError, match=word):
      connect(["refused"], **sizes)


def test_the_shape_of_a_layer_is_passed_in_order():
  names = ["layer0", "layer1"]
  connect(names)
  for shape, word in [
    ((17, 2, 1, 64), "17 tokens"),
    ((16, 33, 1, 64), "top_k = 33"),
    ((16, 2, 3, 64), "alignment = 3"),
    ((16, 2, 1, 68), "recv_capacity_per_rank = 68"),
  ]:
    with pytest.raises(ValueError, match=word):
      ffi.mem_bytes("nccl", "layer0", *shape)
  close(names)
