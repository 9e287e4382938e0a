# SPDX-License-Identifier: Apache-2.0
"""bazelw runs the first program on PATH that can build this project.

.ci/run installs Bazel with bazelw on a machine that has none.
"""

import os
import pathlib
import subprocess

_BAZELW = pathlib.Path(__file__).absolute().parents[2] / "bazelw"
_BAZEL = """#!/bin/sh
[ "$1" = --version ] && echo "bazel {}" || echo {} "$@"
"""


def test_runs_the_bazelisk_or_bazel_on_path(tmp_path):
  for name, version in ("bazelisk", "7.3.0"), ("bazel", "8.1.0"):
    program = tmp_path / name
    program.write_text(_BAZEL.format(version, name))
    program.chmod(0o755)
  variables = {
    "HOME": str(tmp_path),
    "PATH": f"{tmp_path}:{os.environ['PATH']}",
    "USE_BAZEL_VERSION": "8.1.0",
  }
  done = subprocess.run(
    [_BAZELW, "test", "//a b"],
    env=os.environ | variables,
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert (done.returncode, done.stdout) == (0, "bazel test //a b\n")
  assert done.stderr == ""
