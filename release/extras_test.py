# SPDX-License-Identifier: Apache-2.0
"""Tests that the extra installs the wheel for CUDA and ep finds its library.

Usage: extras_test.py CUDA DOCKERFILE FOLDER FOLDER

CUDA is a version, such as 13. The first FOLDER has the wheel of the package,
the second FOLDER has the wheel for CUDA. Empty wheels replace NVIDIA's packages
and JAX's plugin, which take gigabytes. With CUDA 13, the commands of the
DOCKERFILE also install the wheels.
"""

from collections.abc import Iterator
import importlib.metadata
import pathlib
import re
import shutil
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
  dockerfile, *folders = [pathlib.Path(arg).resolve() for arg in sys.argv[2:]]
  (wheel,) = folders[1].glob("*.whl")

  def check(environment: Environment, report: str) -> None:
    library = environment.site / f"jax_ep_cuda{cuda}/libep_ffi_cuda.so"
    assert f"Its library is there, {library}." in report

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

    check(environment, environment.run("python", "-m", "ep", "check"))
    if cuda == "13":
      image = Environment(pathlib.Path(scratch, "image").resolve())
      for folder in folders:
        shutil.copytree(folder, image.work / "wheels", dirs_exist_ok=True)
      found = dict(PIP_FIND_LINKS=str(wheels))
      check(image, image.run_stage(dockerfile, "cuda13", **found))


if __name__ == "__main__":
  main()
