# SPDX-License-Identifier: Apache-2.0
"""Simulates two hosts and a cable between them on this machine, without root.

A host is a set of network, host name, process and mount namespaces
(namespaces(7)). A host lives as long as its first process, which reads from a
pipe of this process. However this process ends, the pipe closes, and the kernel
kills all processes of the host and removes its network.
"""

import contextlib
import os
import pathlib
import subprocess

import pytest

_FIRST = """
mount -t proc proc /proc && hostname host{0} && ip link set lo up && echo up
exec cat
"""
_ADDRESS = "10.64.0.{}"


class Host:
  """A host with the address `address` and the name host<number>."""

  def __init__(self, number, beside=None):
    """Makes a host in the user namespace of the host `beside`, if any."""
    self.number, self.address = number, _ADDRESS.format(number + 1)
    users = ["unshare", "-Ur"] if beside is None else beside.enter("-U")
    new = ["unshare", "-nupmf", "--kill-child", "sh", "-c"]
    pipes = dict.fromkeys(["stdin", "stdout", "stderr"], subprocess.PIPE)
    try:
      self._first = subprocess.Popen(
        [*users, *new, _FIRST.format(number)], text=True, **pipes
      )
    except OSError as e:  # there is no unshare(1) or nsenter(1)
      pytest.skip(f"THIS MACHINE MAKES NO NAMESPACES: {e}")
    if self._first.stdout.readline() != "up\n":
      why = self._first.communicate()[1].strip()
      pytest.skip(f"THIS MACHINE PERMITS NO NAMESPACES: {why}")
    unshare = self._first.pid
    children = pathlib.Path(f"/proc/{unshare}/task/{unshare}/children")
    self._pid = int(children.read_text())

  def enter(self, *flags):
    """Returns the nsenter command for this host's namespaces in `flags`."""
    return ["nsenter", "-t", str(self._pid), *flags, "--preserve-credentials"]

  def start(self, argv, **options):
    """Starts a process on this host, in the current folder."""
    inside = self.enter("-U", "-n", "-u", "-p", "-m", f"--wd={os.getcwd()}")
    return subprocess.Popen([*inside, *argv], **options)

  def ip(self, *words):
    """Runs ip(8) on this host."""
    subprocess.run([*self.enter("-U", "-n"), "ip", *words], check=True)

  def plug_in(self, other):
    """Connects this host and another one with a cable."""
    ends = ["cable", "type", "veth", "peer", "cable", "netns"]
    self.ip("link", "add", *ends, str(other._pid))
    for host in (self, other):
      host.ip("address", "add", f"{host.address}/24", "dev", "cable")
      host.ip("link", "set", "cable", "up")

  def pull_the_cable(self):
    self.ip("link", "set", "cable", "down")

  def close(self):
    """Stops the host and kills its processes."""
    self._first.stdin.close()
    self._first.wait()


@contextlib.contextmanager
def two_hosts():
  """Yields two hosts; skips the test if this machine cannot make them."""
  with contextlib.ExitStack() as stack:
    one = stack.enter_context(contextlib.closing(Host(0)))
    two = stack.enter_context(contextlib.closing(Host(1, beside=one)))
    one.plug_in(two)
    yield one, two
