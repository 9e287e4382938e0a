# SPDX-License-Identifier: Apache-2.0
"""Runs pytest files in every process of a process layout, for `ep_test`.

    run_ranks.py --world=4x1 tests/foo_test.py [pytest arguments...]

The log of each process is one of the test's undeclared outputs.
"""

import argparse
import importlib.util
import os
import re
import subprocess
import sys

# Importing JAX takes a second, and the launcher does not need JAX. This program
# skips ep/__init__.py, which imports JAX.
_PACKAGE = importlib.util.find_spec("ep")
sys.modules["ep"] = importlib.util.module_from_spec(_PACKAGE)

from ep import launch  # noqa: E402
from ep._src.native import shipped_files  # noqa: E402

assert "jax" not in sys.modules

# Variables for a native library that was built with a sanitizer.
_SANITIZER_OPTIONS = {
  # Python and JAX exit without freeing all memory. The C++ tests detect leaks.
  "ASAN_OPTIONS": "detect_leaks=0",
  # JAX, NumPy, Python and XLA's generated code are not instrumented. TSan sees
  # only their accesses through libc, and few of their locks.
  # ep_ffi/handlers/tsan.h tells TSan how XLA orders ep's ops.
  "TSAN_OPTIONS": "ignore_noninstrumented_modules=1",
  "UBSAN_OPTIONS": "print_stacktrace=1",
  # Sanitizers write to a file descriptor. By default, pytest captures the
  # descriptor and drops the report of a test that passes.
  "PYTEST_ADDOPTS": "--capture=sys",
}


def sanitizer_environment() -> dict[str, str]:
  """Returns the variables that a native library with a sanitizer needs.

  Python is not linked with the sanitizer's runtime. LD_PRELOAD loads the
  runtime before the functions that it intercepts, and loads the C++ library
  because ASan looks up `__cxa_throw` only once.
  """
  library = os.environ.get("EP_FFI_LIBRARY_PATH") or shipped_files.in_runfiles(
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
