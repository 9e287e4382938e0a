# SPDX-License-Identifier: Apache-2.0
"""The sdist compiles with the C++ compiler of the machine, and then works.

Usage: sdist_test.py FOLDER

The FOLDER has the sdist.
"""

import pathlib
import sys
import tempfile

from environment import Environment, packages


def main() -> None:
  (sdist,) = pathlib.Path(sys.argv[1]).resolve().glob("*.tar.gz")
  with tempfile.TemporaryDirectory() as scratch:
    environment = Environment(pathlib.Path(scratch).resolve())
    (environment.site / "backend.pth").write_text(packages("hatchling"))
    environment.install("--no-build-isolation", str(sdist), CXXFLAGS="-O0")
    report = environment.run(environment.python, "-m", "ep")
    library = environment.site / "ep/libep_ffi_cpu.so"
    assert f"host (the default) can run on {library}" in report


if __name__ == "__main__":
  main()
