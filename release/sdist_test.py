# SPDX-License-Identifier: Apache-2.0
"""Tests that the sdist compiles with the machine's C++ compiler, and works.

Usage: sdist_test.py FOLDER DOCKERFILE HEADER...

The FOLDER has the sdist. The commands of the DOCKERFILE build the sdist: pip
works in isolation, with only the requirements of [build-system] in
pyproject.toml. A wheel with only the HEADERs of the required version replaces
jaxlib.
"""

import pathlib
import shutil
import sys
import tarfile
import tempfile
import tomllib

from environment import Environment, pack, write_wheel


def main() -> None:
  folder, dockerfile, *headers = map(pathlib.Path, sys.argv[1:])
  (sdist,) = folder.resolve().glob("*.tar.gz")
  with tempfile.TemporaryDirectory() as scratch:
    compiler, image = (
      Environment(pathlib.Path(scratch, name).resolve())
      for name in ("compiler", "image")
    )
    with tarfile.open(sdist) as archive:
      archive.extractall(scratch)
    (project,) = pathlib.Path(scratch).glob("*/pyproject.toml")
    shutil.copytree(project.parent, compiler.work, dirs_exist_ok=True)
    assert (compiler.work / "examples/recipes/flax_moe.py").exists()
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

    compiler.run_stage(
      dockerfile, "wheels", CXXFLAGS="-O0", PIP_FIND_LINKS=str(wheels)
    )
    shutil.copytree(compiler.work / "wheels", image.work / "wheels")
    report = image.run_stage(dockerfile, "cpu")
    library = image.site / "ep/libep_ffi_cpu.so"
    assert f"host (the default) can run on {library}" in report


if __name__ == "__main__":
  main()
