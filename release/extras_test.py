# SPDX-License-Identifier: Apache-2.0
"""Tests that the extra installs the wheel for CUDA and ep finds its library.

Usage: extras_test.py CUDA FOLDER FOLDER

CUDA is a version, such as 13. The first FOLDER has the wheel of the package,
the second FOLDER has the wheel for CUDA. Empty wheels replace NVIDIA's packages
and JAX's plugin, which take gigabytes.
"""

from collections.abc import Iterator
import importlib.metadata
import pathlib
import re
import sys
import tempfile
import zipfile

from environment import Environment, write_wheel


def pins(wheel: pathlib.Path) -> Iterator[tuple[str, str]]:
  """Yields the packages that a wheel pins, except our own."""
  with zipfile.ZipFile(wheel) as archive:
    (name,) = [n for n in archive.namelist() if n.endswith("/METADATA")]
    metadata = archive.read(name).decode()
  for name, version in re.findall(
    r"^Requires-Dist: ([\w-]+)==(\S+)$", metadata, re.M
  ):
    if name != "jax-ep":
      yield name, version


def main() -> None:
  cuda = sys.argv[1]
  folders = [pathlib.Path(folder).resolve() for folder in sys.argv[2:]]
  (wheel,) = folders[1].glob("*.whl")
  with tempfile.TemporaryDirectory() as scratch:
    environment = Environment(pathlib.Path(scratch).resolve())
    wheels = pathlib.Path(scratch, "wheels")
    wheels.mkdir()
    for name, version in pins(wheel):
      write_wheel(wheels, name, version, {})
    write_wheel(
      wheels,
      f"jax-cuda{cuda}-plugin",
      importlib.metadata.version("jax"),
      {f"jax_cuda{cuda}_plugin/__init__.py": b""},
      metadata="Provides-Extra: with-cuda\n",
    )
    found = [f"--find-links={folder}" for folder in (wheels, *folders)]
    environment.install(*found, f"jax-ep[cuda{cuda}]")

    report = environment.run(environment.python, "-m", "ep", "check")
    library = environment.site / f"jax_ep_cuda{cuda}/libep_ffi_cuda.so"
    assert f"Its library is there, {library}." in report


if __name__ == "__main__":
  main()
