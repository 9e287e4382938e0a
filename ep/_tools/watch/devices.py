# SPDX-License-Identifier: Apache-2.0
"""Reads errors that devices and drivers of this host have reported."""

from __future__ import annotations

from collections.abc import Iterator
import os
import pathlib
import re
import subprocess

_KERNEL_LOG = "/dev/kmsg"
_KERNEL_ERROR = re.compile(
  r"Xid|NVLink|NVSwitch|mlx5|AER:|Out of memory|Machine check", re.IGNORECASE
)
_LINK_ERROR = re.compile(r"Link \d+: .*: [1-9]\d*$")
_SMI_LIMIT_S = 10.0
_MAX_LINES = 8  # of each source


def errors(since: float) -> str:
  """Returns the errors since a `time.monotonic`, one per line; "" if none.

  A source that this process cannot read has a line with the reason. Counters of
  NVLink have no time, so they count from the start of the driver.
  """
  sources = _of_kernel(since), _of_links(), _of_tpus()
  return "\n".join(line for s in sources for line in list(s)[-_MAX_LINES:])


def _of_kernel(since: float) -> Iterator[str]:
  """Yields errors of the kernel log: Xid is the word of NVIDIA's driver."""
  try:
    log = os.open(_KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
  except OSError as e:
    yield f"the kernel log cannot be read ({e.strerror})"
    return
  with open(log, "rb", buffering=0) as file:
    while True:
      try:
        record = file.read(8192)  # one record: "6,1234,5678901,-;the message"
      except BlockingIOError:
        return  # the end of the log
      except BrokenPipeError:
        continue  # the kernel overwrote the record
      if not record:
        return
      for line in record.decode(errors="replace").splitlines():
        head, _, message = line.partition(";")
        if line.startswith(" ") or not _KERNEL_ERROR.search(message):
          continue  # a line that starts with a space describes the device
        if int(head.split(",")[2]) >= 1e6 * since:
          yield message


def _of_links() -> Iterator[str]:
  """Yields the NVLink counters of errors that are not 0."""
  try:
    # A process, because a call of a broken driver may not return.
    done = subprocess.run(
      ["nvidia-smi", "nvlink", "-e"],
      capture_output=True,
      text=True,
      errors="replace",
      timeout=_SMI_LIMIT_S,
    )
  except FileNotFoundError:
    return  # no GPU of NVIDIA's
  except (OSError, subprocess.TimeoutExpired) as e:
    yield f"nvidia-smi does not answer: {e}"
    return
  if done.returncode:
    yield f"nvidia-smi fails: {(done.stderr or done.stdout).strip()[:200]}"
  gpu = ""
  for line in map(str.strip, done.stdout.splitlines()):
    if line.startswith("GPU "):
      gpu = line.partition(":")[0]
    elif _LINK_ERROR.match(line):
      yield f"{gpu}, {line}"


def _of_tpus() -> Iterator[str]:
  """Yields the errors in the log of this process's libtpu."""
  folder = pathlib.Path(os.environ.get("TPU_LOG_DIR", "/tmp/tpu_logs"))
  for path in sorted(folder.glob(f"tpu_driver.*.log.*.{os.getpid()}")):
    try:
      lines = path.read_text(errors="replace").splitlines()
    except OSError:
      continue
    yield from (line for line in lines if re.match(r"[EF]\d{4} ", line))
