# SPDX-License-Identifier: Apache-2.0
"""ep logs which flags turn on XLA's device kernel for ragged all-to-alls."""

import logging

import jax
import jaxlib.version
import numpy as np
import pytest

from conftest import make_mesh
import ep
from ep.__main__ import main
from ep._src.backends.xla import device_kernels
from nccl_testing import gpu

KERNEL = "--xla_gpu_experimental_ragged_all_to_all_use_device_kernel"
BUFFERS = "--xla_enable_nccl_symmetric_buffers_for_collectives"
BOTH = f"{KERNEL}=true {BUFFERS}=raggedalltoall"


def note(monkeypatch, flags="", jaxlib_version="0.12.0.1", processes=(0, 0)):
  monkeypatch.setenv("XLA_FLAGS", flags)
  monkeypatch.setattr(jaxlib.version, "__version__", jaxlib_version)
  return device_kernels.note(np.array([[gpu(p) for p in processes]]))


@pytest.mark.parametrize(
  "flags, missing",
  [
    ("", BOTH),
    ("--xla_a=1", BOTH),
    (f"{BUFFERS}=raggedalltoall", f"{KERNEL}=true"),
    (f"{KERNEL}=false {BUFFERS}=raggedalltoall", f"{KERNEL}=true"),
    (f"{KERNEL}=true {KERNEL}=0 {BUFFERS}=raggedalltoall", f"{KERNEL}=true"),
    (f"{KERNEL} {BUFFERS}=allreduce", f"{BUFFERS}=raggedalltoall"),
    (f"{KERNEL}=1 {BUFFERS}=", f"{BUFFERS}=raggedalltoall"),
    (f"{KERNEL}_2=1 {BUFFERS}=raggedalltoall", f"{KERNEL}=true"),
  ],
)
def test_flags_that_are_missing(monkeypatch, flags, missing):
  text = note(monkeypatch, flags)
  assert text.endswith(f"is off; to turn it on, add to XLA_FLAGS: {missing}")


@pytest.mark.parametrize(
  "flags",
  [
    BOTH,
    f"  {BUFFERS}=AllReduce,RaggedAllToAll\n --xla_a {KERNEL}",
    f"{KERNEL}=false '{KERNEL}=True' {BUFFERS}=RAGGEDALLTOALL",
  ],
)
def test_flags_that_are_set(monkeypatch, flags, tmp_path):
  """XLA_FLAGS contains the flags, or names a file that contains them."""
  path = tmp_path / "flags"
  path.write_text(flags)
  for text in flags, str(path):
    assert note(monkeypatch, text).endswith("is on.")


@pytest.mark.parametrize(
  "jaxlib_version, processes, needed",
  [
    ("0.10.2", [0, 0], "0.11.1"),
    ("0.11.0", [0, 0], "0.11.1"),
    ("0.11.1", [0, 0], None),
    ("0.11.1", [0, 1], "0.11.2"),
    ("0.11.2", [0, 1], None),
    ("0.11.2", range(32), None),
    ("0.11.2", range(33), "0.12.0"),
    ("0.12.0", range(33), None),
    ("0.12.0.dev20261001", range(33), None),
  ],
)
def test_versions_of_jaxlib(monkeypatch, jaxlib_version, processes, needed):
  text = note(monkeypatch, BOTH, jaxlib_version, processes)
  words = (
    f"is on; for {len(processes)} ranks of {len(set(processes))} processes it"
    f" needs jaxlib {needed}, and this is {jaxlib_version}."
  )
  assert text.endswith(words if needed else "is on.")


def test_old_versions_get_no_flags(monkeypatch):
  """XLA terminates a process that sets a flag which XLA does not know."""
  text = note(monkeypatch, "", "0.10.2")
  assert "is off; " in text and "0.11.1" in text and "--" not in text


@pytest.mark.parametrize(
  "devices",
  [
    jax.local_devices()[:2],
    [gpu(compute_capability="gfx942")] * 2,
    [gpu()],
  ],
)
def test_there_is_no_note_without_an_exchange_between_nvidia_gpus(devices):
  assert not device_kernels.note(np.array([devices]))


def test_the_check_prints_the_note(monkeypatch, capsys):
  monkeypatch.setenv("XLA_FLAGS", "")
  monkeypatch.setattr(jax, "local_devices", lambda **_: [gpu(), gpu()])
  expected = device_kernels.note(np.array([[gpu(), gpu()]]))
  main(["check"])
  assert f"xla on these GPUs: {expected}\n" in capsys.readouterr().out


def test_the_bootstrap_logs_the_note(monkeypatch, caplog):
  """Only backend="xla" logs the note, for the group's EP domains."""
  monkeypatch.setattr(device_kernels, "note", lambda d: f"shape {d.shape}")
  with caplog.at_level(logging.INFO, "ep"):
    for backend in "xla", "host":
      mesh = make_mesh({"ep": 2, "dp": 2})
      group = ep.ep_bootstrap(mesh, num_experts=4, backend=backend, name="g")
      ep.ep_finalize(group)
  assert [r.getMessage() for r in caplog.records] == ['group "g": shape (2, 2)']
