# SPDX-License-Identifier: Apache-2.0
"""Kernels are compiled into NCCL EP's cache, here by a stand-in of nvcc."""

import fcntl
import logging
import os
import re
import threading

import jax.numpy as jnp
import pytest

import ep
from ep._src.backends.nccl import (
  command,
  installation,
  kernels,
  sources,
  variants,
)
from nccl_testing import gpu

HOPPER = variants.Gpu(sm=90, num_sms=132, shared_bytes=232448)
DEEPSEEK = variants.Sizes(
  num_experts=256,
  ep_size=8,
  nvlink_ranks=8,
  max_tokens=4096,
  width=7168,
  dtype=jnp.dtype(jnp.bfloat16),
  top_k=8,
  max_num_sms=0,
)


def no_pieces(*words):
  """Stands in for NCCL EP's library."""
  return "".join(words)


# --- Names and keys ----------------------------------------------------------


# NCCL EP's own code, run on the CPU, gave these names.
@pytest.mark.parametrize(
  "sizes, names",
  [
    (
      DEEPSEEK,
      """
combine_LSATeams1_lsa8_hdim7168_g2s12_s2g2_pipe2_chunk64_maxt4096_group4
_blocks16_bwd_rm_tbf16
combine_LSATeams1_lsa8_hdim7168_g2s12_s2g2_pipe2_chunk64_maxt4096_group4
_blocks16_fwd_rm_tbf16
dispatch_LSATeams1_lsa8_hdim7168_stages12_pipe2_inflt4_chunk64_maxt4096
_blocks16_bwd_rm_recipenone_payloadu16_scalenone_sf0
dispatch_LSATeams1_lsa8_hdim7168_stages12_pipe2_inflt4_chunk64_maxt4096
_blocks16_fwd_rm_recipenone_payloadu16_scalenone_sf0
local_permute_dup_h896_v4_b1
local_permute_reduce_topk8_h896_b1_tbf16
scan_flat_LSATeams1_lsa8_threads512_blocks132_nopec_em_epr32_i64
""",
    ),
    # The network connects two teams, and sizes are no multiples.
    (
      variants.Sizes(64, 16, 8, 1000, 2880, jnp.dtype(jnp.float32), 4, 8),
      """
combine_LSATeams2_lsa8_hdim2880_g2s4_s2g2_pipe1_chunk64_maxt1024_group4
_blocks8_bwd_rm_tfp32
combine_LSATeams2_lsa8_hdim2880_g2s4_s2g2_pipe1_chunk64_maxt1024_group4
_blocks8_fwd_rm_tfp32
dispatch_LSATeams2_lsa8_hdim2880_stages12_pipe2_inflt4_chunk64_maxt1024
_blocks8_bwd_rm_recipenone_payloadu32_scalenone_sf0
dispatch_LSATeams2_lsa8_hdim2880_stages12_pipe2_inflt4_chunk64_maxt1024
_blocks8_fwd_rm_recipenone_payloadu32_scalenone_sf0
local_permute_dup_h720_v1_b1
local_permute_reduce_topk4_h720_b1_tfp32
scan_flat_LSATeams2_lsa8_threads512_blocks8_nopec_em_epr4_i64
""",
    ),
    # Rows are so long that fewer stages fit into the shared memory.
    (
      variants.Sizes(8, 2, 2, 100, 24000, jnp.dtype(jnp.bfloat16), None, 0),
      """
combine_LSATeams1_lsa2_hdim24000_g2s2_s2g2_pipe2_chunk64_maxt128_group4
_blocks16_bwd_rm_tbf16
combine_LSATeams1_lsa2_hdim24000_g2s2_s2g2_pipe2_chunk64_maxt128_group4
_blocks16_fwd_rm_tbf16
dispatch_LSATeams1_lsa2_hdim24000_stages4_pipe1_inflt3_chunk64_maxt128
_blocks16_bwd_rm_recipenone_payloadu16_scalenone_sf0
dispatch_LSATeams1_lsa2_hdim24000_stages4_pipe1_inflt3_chunk64_maxt128
_blocks16_fwd_rm_recipenone_payloadu16_scalenone_sf0
local_permute_dup_h3000_v1_b1
scan_flat_LSATeams1_lsa2_threads512_blocks132_nopec_em_epr4_i64
""",
    ),
  ],
)
def test_kernels_have_the_names_of_nccl_ep(sizes, names):
  found = variants.variants(sizes, HOPPER, no_pieces)
  assert sorted(v.name for v in found) == sorted(
    names.replace("\n_", "_").split()
  )


def test_rows_that_do_not_fit_are_refused():
  sizes = variants.Sizes(8, 2, 2, 100, 60000, jnp.dtype(jnp.bfloat16), None, 0)
  with pytest.raises(ValueError, match="shared memory"):
    variants.variants(sizes, HOPPER, no_pieces)


def test_hashes():
  """libstdc++ and FNV's definition gave these values."""
  for text, value in [
    (b"", 6142509188972423790),
    (b"scan", 17214352299009876577),
    (b"combine1", 384450738456775992),
    (b"scan_flat_LSATeams1_lsa8", 16996390536667334916),
  ]:
    assert kernels._std_hash(text) == value
  assert kernels._hash([]) == "14650fb0739d0383"
  assert kernels._hash(["a", b"bc"]) == kernels._hash([b"a", "bc"])
  assert kernels._hash(["a", "bc"]) != kernels._hash(["ab", "c"])


# --- The cache ---------------------------------------------------------------

# It writes half a kernel, and waits for another nvcc, or for a second.
NVCC = """#!/bin/sh
[ "$1" = --version ] && echo release 13.0 && exit
touch "$LOG.run.$$"
echo "$@" >> "$LOG"
test -e kernel.cubin && echo too early && exit 3
printf half > "$4"
i=0
while [ $i -lt 50 ] && [ "$(ls "$LOG".run.* | wc -l)" -lt 2 ]; do
  i=$((i + 1)); sleep 0.02
done
ls "$LOG".run.* | wc -l >> "$LOG.seen"
cat "$2" >> "$4"
exit ${CODE:-0}
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
  """Returns a function that compiles the kernels "a" and "b" of a group."""
  nvcc = tmp_path / "nvcc"
  nvcc.write_text(NVCC)
  nvcc.chmod(0o755)
  headers = tmp_path / "headers"
  (headers / "device").mkdir(parents=True)
  (headers / "device/ht_ep.cuh").write_text("// a header")
  cache = tmp_path / "cache"
  cache.mkdir()
  library = tmp_path / "libnccl_ep.so"
  library.write_bytes(b"\0")
  monkeypatch.setenv("LOG", str(tmp_path / "log"))
  monkeypatch.setenv(installation.CACHE_VARIABLE, str(cache))
  monkeypatch.delenv("NVCC_ARCH_FLAGS", raising=False)
  monkeypatch.setattr(os, "cpu_count", lambda: 2)
  monkeypatch.setattr(
    variants,
    "variants",
    lambda *_: [
      variants.Variant("family", name, "entry", f"source of {name}")
      for name in "ab"
    ],
  )
  compiler = installation.Compiler(nvcc, headers, headers, headers, 90)
  prepared = ("", str(library), compiler)
  monkeypatch.setattr(installation, "prepare_for", lambda *_: prepared)
  return lambda: kernels.compile_missing(DEEPSEEK, HOPPER, *prepared[1:])


def cached(tmp_path, name):
  return sorted(tmp_path.glob(f"cache/*/{name}"))


def calls(tmp_path):
  log = tmp_path / "log"
  return log.read_text().splitlines() if log.exists() else []


def test_kernels_are_compiled_side_by_side_and_once(machine, tmp_path):
  assert machine() == dict(a=kernels.COMPILED, b=kernels.COMPILED)
  cubins = cached(tmp_path, "kernel.cubin")
  assert {c.read_text() for c in cubins} == {
    "halfsource of a",
    "halfsource of b",
  }
  assert "2" in (tmp_path / "log.seen").read_text().split()
  files = {path.name for path in tmp_path.glob("cache/*/*")}
  assert files == {"compile.lock", "kernel.cu", "kernel.cubin"}
  assert machine() == dict(a=kernels.KNOWN, b=kernels.KNOWN)
  assert len(calls(tmp_path)) == 2
  headers = tmp_path / "headers"
  for call in calls(tmp_path):
    _, source, _, _, *options = call.split()
    assert source == "kernel.cu"
    assert options[3:6] == ["-arch=sm_90", f"-I{tmp_path}", f"-I{headers}"]


def test_the_key_has_all_that_a_kernel_is_made_of(machine, tmp_path):
  """Other headers or options make other kernels."""
  machine()
  (tmp_path / "headers/device/ht_ep.cuh").write_text("// another header")
  machine()
  assert len(cached(tmp_path, "kernel.cubin")) == 4


def test_a_failure_is_logged_and_leaves_nothing(
  machine, tmp_path, monkeypatch, caplog
):
  """NCCL EP would not try again if there were a file compile.failed."""
  monkeypatch.setenv("CODE", "1")
  assert machine() == dict(a=kernels.FAILED, b=kernels.FAILED)
  assert {path.name for path in tmp_path.glob("cache/*/*")} == {
    "compile.lock",
    "kernel.cu",
  }
  assert "the kernel a was not compiled ahead" in caplog.text
  monkeypatch.delenv("CODE")
  assert machine() == dict(a=kernels.COMPILED, b=kernels.COMPILED)


def test_a_kernel_that_another_process_compiles_is_left_to_it(
  machine, tmp_path
):
  machine()
  first, _ = cached(tmp_path, "kernel.cubin")
  first.unlink()
  with first.with_name("compile.lock").open("a") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    assert sorted(machine().values()) == [kernels.BUSY, kernels.KNOWN]
  assert kernels.COMPILED in machine().values()


def test_processes_of_a_host_share_the_work(machine, tmp_path):
  """Each has threads of its own, and a lock belongs to an open file."""
  ranks = [threading.Thread(target=machine) for _ in range(4)]
  for rank in ranks:
    rank.start()
  for rank in ranks:
    rank.join()
  assert len(cached(tmp_path, "kernel.cubin")) == 2
  assert len(calls(tmp_path)) == 2


def test_a_group_compiles_in_the_background(machine, tmp_path, caplog):
  caplog.set_level(logging.INFO, "ep")
  device = gpu(0, core_count=132, shared_memory_per_block_optin=232448)
  kernels.start(DEEPSEEK, device).join()
  assert len(cached(tmp_path, "kernel.cubin")) == 2
  assert "'a': 'compiled'" in caplog.text
  kernels.start(DEEPSEEK, gpu(0)).join()  # an older JAX's, without a count
  assert "compile each at its first launch" in caplog.text


def test_a_library_that_is_missing_or_another_is_refused(machine, tmp_path):
  compiler = installation.prepare_for()[2]
  with pytest.raises(LookupError, match="install nccl-extensions"):
    kernels.compile_missing(DEEPSEEK, HOPPER, "", compiler)
  with pytest.raises(LookupError, match="is not NCCL EP 0.2.0"):
    sources.Pieces(tmp_path / "libnccl_ep.so")("device/ht_ep.cuh")


# --- python -m ep compile ----------------------------------------------------


def compile_command(*arguments):
  return command.main(arguments, ep.presets.BY_NAME)


def test_a_preset_is_compiled(machine, tmp_path, monkeypatch, capsys):
  asked = []
  monkeypatch.setattr(
    kernels,
    "compile_missing",
    lambda *what: asked.append(what[:2]) or dict(a=kernels.COMPILED),
  )
  monkeypatch.setenv(installation.CACHE_VARIABLE, "")  # it is set below
  folder = str(tmp_path / "mine")
  assert not compile_command(
    "--preset=deepseek_v3", "--ranks=8", f"--cache={folder}"
  )
  assert asked == [(DEEPSEEK, HOPPER)]
  output = capsys.readouterr().out
  assert "a compiled\n1 kernels for sm_90 with 132 SMs" in output
  assert f"in {folder}. Set NCCL_EP_JIT_CACHE_DIR to it" in output


@pytest.mark.parametrize(
  "arguments, words",
  [
    (["--ranks=7"], "--ranks=7 does not divide the 256 experts"),
    (["--ranks=8", "--arch=sm_90a"], "no letter.*sm_90, sm_100"),
    (["--ranks=8", "--max_tokens_per_rank=4"], "no nvcc"),
  ],
)
def test_a_mistake_has_a_cure(monkeypatch, capsys, arguments, words):
  def prepare(*_):
    raise RuntimeError("ep_bootstrap: there is no nvcc; install one.")

  monkeypatch.setattr(installation, "prepare_for", prepare)
  assert compile_command("--preset=deepseek_v3", *arguments) == 1
  (line,) = capsys.readouterr().out.splitlines()
  assert re.search(words, line)
  assert line.startswith("compile: ") and line.endswith(".")
