# SPDX-License-Identifier: Apache-2.0
"""bazelw finds or installs Bazel, and reports waits and failures.

The tests run bazelw with stubs: a PATH, a home folder, and an installer of
Debian's Bazel that downloads nothing.
"""

import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import time

import pytest

_ROOT = pathlib.Path(__file__).absolute().parents[2]
# The scripts call these programs.
_TOOLS = """
  bash cat chmod cp env flock mkdir mv readlink rm sh sha256sum sleep timeout
  touch uname
""".split()
_BAZEL = '#!/bin/sh\n[ "$1" = --version ] && echo "bazel {}" || echo {} "$@"\n'


def _program(path, text):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(text)
  path.chmod(0o755)


class Machine:
  """A checkout with bazelw, a PATH and a home folder."""

  def __init__(self, folder):
    self.home = folder / "a home"
    self.bin = folder / "bin"
    self.checkout = folder / "checkout"
    self.env = {"HOME": str(self.home), "PATH": str(self.bin)}
    self.home.mkdir()
    self.bin.mkdir()
    for tool in _TOOLS:
      (self.bin / tool).symlink_to(shutil.which(tool))
    _program(self.bin / "python3", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (self.checkout / "tools").mkdir(parents=True)
    shutil.copy(_ROOT / "bazelw", self.checkout)
    (self.checkout / ".bazelversion").write_text("7.7.1\n")
    rc = _ROOT / "tools" / "debian_bazel_rc.sh"
    # The real script also calls debian_bazel_rc.sh, after it unpacks packages.
    _program(
      self.checkout / "tools" / "debian_bazel.sh",
      f"""#!/bin/bash
set -e
echo called >>{folder}/installs
root=$1.partial/root
mkdir -p "$root"/usr/{{bin,share/{{bazel,python-wheels}}}}
mkdir -p "$root"/usr/lib/jvm/java-21-openjdk-x
touch "$root/usr/share/python-wheels/pip-1-py3-none-any.whl"
cp {folder}/debian "$root/usr/bin/bazel"
bash {rc} "$1.partial" "$1"
mv "$1.partial" "$1"
""",
    )
    _program(
      folder / "debian",
      """#!/bin/sh
case " $* " in *" --version "*) echo "bazel 7.7.1" ;; esac
for arg; do echo "$arg" >>"$HOME/args"; done
""",
    )
    self.installs = folder / "installs"

  def run(self, *args):
    return subprocess.run(
      [self.checkout / "bazelw", *args],
      env=self.env,
      capture_output=True,
      text=True,
      timeout=60,
    )


@pytest.fixture
def machine(tmp_path):
  return Machine(tmp_path)


def test_runs_the_bazelisk_or_bazel_on_path(machine):
  _program(machine.bin / "bazelisk", _BAZEL.format("7.3.0", "bazelisk"))
  _program(machine.bin / "bazel", _BAZEL.format("8.1.0", "bazel"))
  done = machine.run("test", "//a b")
  assert (done.returncode, done.stdout) == (0, "bazel test //a b\n")
  assert done.stderr == ""


def test_installs_in_a_home_with_a_space(machine):
  for _ in range(2):  # The second run finds what the first installed.
    done = machine.run("test", "a b")
    assert done.returncode == 0, done.stderr
  assert machine.installs.read_text() == "called\n"
  prefix = machine.home / ".cache" / "jax_ep" / "debian-bazel-1"
  passed = (machine.home / "args").read_text().splitlines()
  own = ["--nosystem_rc", f"--bazelrc={prefix}/bazelrc"]
  assert passed[-4:] == [*own, "test", "a b"]
  # Bazel reads rc files by the quoting rules of a shell.
  options = [
    shlex.split(line) for line in (prefix / "bazelrc").read_text().splitlines()
  ]
  assert all(len(option) == 2 for option in options)
  values = dict(o.rpartition("=")[::2] for _, o in options if "=" in o)
  base = prefix / "root/usr/share/bazel"
  assert values["--install_base"] == str(base)
  assert values["--override_module=rules_cc"] == f"{base}/rules/cc"
  assert values["--registry"] == (prefix / "registry").as_uri()
  for name in ["--repo_env=EP_PIP_WHEEL", "--server_javabase"]:
    assert pathlib.Path(values[name]).exists()


def test_says_that_its_cache_cannot_be_written_to(machine):
  machine.env["HOME"] = "/dev/null"
  done = machine.run("test")
  assert done.returncode == 1
  assert "XDG_CACHE_HOME" in done.stderr.splitlines()[-1]
  assert "/dev/null/.cache/jax_ep" in done.stderr
  assert not machine.installs.exists()


def test_waits_once_for_a_bazel_that_hangs_and_says_so(machine):
  hang = '#!/bin/sh\necho >>"$HOME/calls"\nsleep 600\n'
  _program(machine.bin / "bazel", hang)
  machine.env["BAZELW_TIMEOUT_S"] = "3"
  begin = time.monotonic()
  done = machine.run("test")
  assert time.monotonic() - begin < 20
  assert done.returncode == 0
  waiting, unanswered, *_ = done.stderr.splitlines()
  assert waiting == (
    f"bazelw: waiting for '{machine.bin}/bazel --version', for up to 3 s"
  )
  assert f"'{machine.bin}/bazel' does not answer" in unanswered
  assert (machine.home / "calls").read_text() == "\n"
  assert os.path.exists(machine.installs)
