# SPDX-License-Identifier: Apache-2.0
"""Checks which commands Bazel would run in a workspace that uses jax_ep.

    analysis_test.py CONSUMER [CLASS...]

CONSUMER is the folder of such a workspace. A Bazel test cannot query Bazel, so
.ci/run starts this program. Bazel also gets the flags in the variable FLAGS.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

_BAZELW = pathlib.Path(__file__).resolve().parents[2] / "bazelw"
_CPU = "@jax_ep//ep_ffi:libep_ffi_cpu.so"


def bazel(*args: str, **environment: str) -> str:
  done = subprocess.run(
    [_BAZELW, args[0], *os.environ.get("FLAGS", "").split(), *args[1:]],
    env=os.environ | environment,
    capture_output=True,
    text=True,
  )
  if done.returncode:
    raise AssertionError(f"bazel {' '.join(args)} failed:\n{done.stderr}")
  return done.stdout


def compilations(target: str, *flags: str) -> dict[str, list[str]]:
  """Returns the commands that compile our files for `target`, by source."""
  query = f'mnemonic("CppCompile", deps({target}))'
  answer = json.loads(bazel("aquery", "--output=jsonproto", *flags, query))
  lines = [action["arguments"] for action in answer["actions"]]
  sources = [line[line.index("-c") + 1] for line in lines]
  return {k: v for k, v in zip(sources, lines, strict=True) if "/ep_ffi/" in k}


def last(line: list[str], *options: str) -> str | None:
  """Returns the last of contradicting options; compilers obey the last one."""
  return next((option for option in line[::-1] if option in options), None)


def check_line(test: unittest.TestCase, line: list[str], level: str | None):
  """Checks that our options come last in a command line, so they win."""
  test.assertEqual(last(line, "-O0", "-O1", "-O2", "-O3"), level)
  test.assertEqual("-DNDEBUG" in line, bool(level))
  test.assertEqual(last(line, "-std=c++14", "-std=c++17"), "-std=c++17")
  math = "-ffast-math", "-fno-fast-math"
  test.assertEqual(last(line, *math), "-fno-fast-math")
  # In Clang, -fno-fast-math may also change -ffp-contract.
  contract = "-ffp-contract=off"
  test.assertEqual(last(line, *math, contract), contract)
  test.assertEqual(last(line, "-Werror", "-Wno-error"), "-Wno-error")


def only_with_bzlmod(test: unittest.TestCase):
  """Skips a test that downloads much, except in the consumer with Bzlmod."""
  if not pathlib.Path("MODULE.bazel").exists():
    test.skipTest("would download the same files a second time")


class Compilation(unittest.TestCase):
  """The consumer's flags do not change how the engine is compiled."""

  THEIRS = "--copt=-ffast-math", "--copt=-Werror"

  def test_the_engine_is_optimized_except_in_debug_builds(self):
    for mode, level in ("fastbuild", "-O2"), ("opt", "-O2"), ("dbg", None):
      flags = f"--compilation_mode={mode}", *self.THEIRS
      lines = compilations(_CPU, *flags)
      self.assertGreater(len(lines), 6)
      for source, line in lines.items():
        with self.subTest(mode=mode, source=source):
          check_line(self, line, level)


class Cuda(unittest.TestCase):
  """One line in a consumer's .bazelrc selects the build of ep for CUDA."""

  CONFIG = "--config=cuda13"

  def setUp(self):
    only_with_bzlmod(self)

  def test_programs_bring_the_jax_plugin(self):
    # Empty packages in the consumer replace packages that download slowly.
    flags = [
      f"--@jax_ep//third_party/py:{package}=//:{package}"
      for package in ("absl", "jax_gpu")
    ]
    programs = "examples:ep_moe", "benchmarks:ep_bench"
    labels = " + ".join(f"@jax_ep//{program}" for program in programs)
    query = f"rdeps({labels}, //:jax_gpu)"
    with_cuda = bazel("cquery", *flags, self.CONFIG, query)
    for program in programs:
      self.assertRegex(with_cuda, rf"//{program} ")
    self.assertEqual(
      bazel("cquery", *flags, f"somepath({labels}, //:jax_gpu)"), ""
    )


class Python(unittest.TestCase):
  """Python's version matters to our packages, and not to the native library."""

  def test_any_python_builds_the_native_library(self):
    only_with_bzlmod(self)
    folder = self.enterContext(tempfile.TemporaryDirectory())
    python = pathlib.Path(folder, "python3")
    python.write_text(
      "#!/bin/sh\n"
      '[ "$1" != -c ] || exec echo "$0 3.99"\n'
      f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o700)
    path = f"{folder}:{os.environ['PATH']}"
    bazel("build", "--nobuild", _CPU, PATH=path)
    package = "@jax_ep//third_party/py:flatbuffers"
    with self.assertRaisesRegex(AssertionError, "has 3.99.*@their_pip"):
      bazel("build", "--nobuild", package, PATH=path)


if __name__ == "__main__":
  os.chdir(sys.argv.pop(1))
  unittest.main()
