# SPDX-License-Identifier: Apache-2.0
"""Runs a pytest file in every rank of a world; the main of each `ep_test`.

    run_ranks.py --world=4x1 tests/foo_test.py [pytest arguments...]

Each rank's log is among the test's undeclared outputs.
"""

import argparse
import os
import re
import subprocess
import sys

from ep import launch
from ep._src import files

# Where the native library was built with a sanitizer.
_SANITIZER_OPTIONS = {
  # Python and JAX end with much of their memory in use. Leaks are looked for in
  # the tests in C++.
  "ASAN_OPTIONS": "detect_leaks=0",
  # JAX, NumPy, Python and what XLA compiles are not instrumented: of their
  # accesses TSan sees only those through libc, and little of what orders them.
  # How XLA orders our ops it learns from ep_ffi/handlers/handover.h.
  "TSAN_OPTIONS": "ignore_noninstrumented_modules=1",
  "UBSAN_OPTIONS": "print_stacktrace=1",
  # What they say is not to be kept with the output of a test that passes.
  "PYTEST_ADDOPTS": "--capture=sys",
}


def sanitizer_environment() -> dict[str, str]:
  """Variables of the ranks; none if the native library is a plain one.

  A sanitizer's runtime has to come before all that it intercepts, and the
  program here is Python's. So has the C++ library, in which ASan looks up
  `__cxa_throw` only once.
  """
  library = os.environ.get("EP_FFI_LIBRARY_PATH") or files.in_runfiles(
    "jax_ep/ep_ffi/libep_ffi_cpu.so"
  )
  if not library:
    return {}
  needed = subprocess.run(
    ["ldd", library], capture_output=True, text=True, check=False
  ).stdout
  runtimes = re.findall(r"lib(?:a|t|ub)san\.so\S* => (\S+)", needed)
  if not runtimes:
    return {}
  runtimes += re.findall(r"libstdc\+\+\.so\S* => (\S+)", needed)
  return {"LD_PRELOAD": " ".join(runtimes), **_SANITIZER_OPTIONS}


def main() -> int:
  parser = argparse.ArgumentParser()
  parser.add_argument("--world", required=True, help="processes x devices")
  parser.add_argument("--ranks_per_gpu", type=int, default=1)
  parser.add_argument("--timeout", type=float, required=True, help="seconds")
  args, pytest_args = parser.parse_known_args()
  processes, devices = map(int, args.world.split("x"))
  only = os.environ.get("TESTBRIDGE_TEST_ONLY")  # bazel test --test_filter
  return launch.launch(
    ["-m", "pytest", "-rs", "-p", "no:cacheprovider"]
    + (["-k", only] if only else [])
    + pytest_args,
    num_processes=processes,
    devices_per_process=devices,
    ranks_per_gpu=args.ranks_per_gpu,
    timeout_s=args.timeout,
    env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **sanitizer_environment()},
  )


if __name__ == "__main__":
  sys.exit(main())
