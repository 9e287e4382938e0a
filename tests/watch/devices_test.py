# SPDX-License-Identifier: Apache-2.0
"""ep.watch reads errors of devices, from files and a program like the real."""

import os

import pytest

from ep._tools.watch import devices

_LOG = """\
6,1,1000000,-;NVRM: Xid (PCI:0000:1b:00): 79, an old one
6,2,5000000,-;usb 1-1: new device
4,3,6000000,-;NVRM: Xid (PCI:0000:1b:00): 74, pid=7, NVLink: fatal error
 DEVICE=a,b,c;Xid
"""
_SMI = """\
#!/bin/sh
cat <<EOF
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)
\t Link 0: Replay Errors: 0
\t Link 0: CRC Errors: 0
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-1)
\t Link 3: Replay Errors: 12
EOF
"""


@pytest.fixture
def host(tmp_path, monkeypatch):
  """A host without a kernel log, GPUs and TPUs."""
  monkeypatch.setattr(devices, "_KERNEL_LOG", str(tmp_path / "kmsg"))
  monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
  monkeypatch.setenv("TPU_LOG_DIR", str(tmp_path))
  return tmp_path


def test_errors_of_all_devices_are_read(host):
  (host / "kmsg").write_text(_LOG)
  smi = host / "nvidia-smi"
  smi.write_text(_SMI)
  smi.chmod(0o755)
  log = host / f"tpu_driver.vm.me.log.INFO.20261127-100000.{os.getpid()}"
  log.write_text("I1127 10:00:00 a\nE1127 10:00:01 the ICI link is down\n")
  assert devices.errors(since=5.0).splitlines() == [
    "NVRM: Xid (PCI:0000:1b:00): 74, pid=7, NVLink: fatal error",
    "GPU 1, Link 3: Replay Errors: 12",
    "E1127 10:00:01 the ICI link is down",
  ]


def test_no_error_and_an_unreadable_source_differ(host):
  assert devices.errors(0) == (
    "the kernel log cannot be read (No such file or directory)"
  )
  (host / "kmsg").write_text("")
  assert devices.errors(0) == ""


def test_a_driver_that_hangs_or_fails_says_so(host, monkeypatch):
  (host / "kmsg").write_text("")
  smi = host / "nvidia-smi"
  monkeypatch.setattr(devices, "_SMI_LIMIT_S", 0.2)
  for body, says in (
    ("exec sleep 60", "does not answer"),
    ("echo no driver; exit 9", "nvidia-smi fails: no driver"),
    (r"printf '\377 no UTF-8'; exit 9", "nvidia-smi fails: \ufffd no UTF-8"),
  ):
    smi.write_text(f"#!/bin/sh\n{body}\n")
    smi.chmod(0o755)
    assert says in devices.errors(0)
