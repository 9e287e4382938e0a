# SPDX-License-Identifier: Apache-2.0
"""Tests that the sdist compiles with the machine's C++ compiler, and works.

Usage: sdist_test.py FOLDER HEADER...

The FOLDER has the sdist. pip builds the sdist in isolation, with only the
requirements of [build-system] in pyproject.toml. A wheel with only the HEADERs
of the required version replaces jaxlib.
"""

import pathlib
import sys
import tarfile
import tempfile
import tomllib

from environment import Environment, pack, write_wheel


def main() -> None:
  folder, *headers = map(pathlib.Path, sys.argv[1:])
  (sdist,) = folder.resolve().glob("*.tar.gz")
  with tempfile.TemporaryDirectory() as scratch:
    environment = Environment(pathlib.Path(scratch).resolve())
    with tarfile.open(sdist) as archive:
      archive.extractall(scratch)
    (project,) = pathlib.Path(scratch).glob("*/pyproject.toml")
    assert (project.parent / "examples/recipes/flax_moe.py").exists()
    required = tomllib.loads(project.read_text())["build-system"]
    wheels = pathlib.Path(scratch, "wheels")
    wheels.mkdir()
    backend, jaxlib = required["requires"]
    pack(wheels, backend)
    files = {
      f"jaxlib/include/{'/'.join(path.parts[-4:])}": path.read_bytes()
      for path in headers
    }
    files["jaxlib/__init__.py"] = b""
    write_wheel(wheels, *jaxlib.split("=="), files)

    environment.pip(
      *("install", f"--find-links={wheels}", str(project.parent)),
      CXXFLAGS="-O0",
    )
    report = environment.run("python", "-m", "ep", "info")
    library = environment.site / "ep/libep_ffi_cpu.so"
    assert f"host (the default) can run on {library}" in report


if __name__ == "__main__":
  main()
