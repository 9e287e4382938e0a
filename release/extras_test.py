# SPDX-License-Identifier: Apache-2.0
"""Tests that pip installs the wheel for CUDA, and ep finds its files.

Usage: extras_test.py CUDA DOCKERFILE FOLDER FOLDER

CUDA is a version, such as 13. The first FOLDER has the wheel of the package,
the second FOLDER has the wheel for CUDA. Empty wheels replace NVIDIA's packages
and JAX's plugin, which take gigabytes. pip resolves the requirements of the two
wheels, of the installed JAX, and of the plugin on NCCL. With CUDA 13, the
commands of the DOCKERFILE also install the wheels.
"""

import importlib.metadata
import json
import pathlib
import re
import shutil
import sys
import tempfile
import zipfile

from environment import Environment, write_wheel

# An NCCL of the future, which ep_bootstrap refuses.
_UNKNOWN = "2.99.0"


def metadata(wheel: pathlib.Path) -> str:
  with zipfile.ZipFile(wheel) as archive:
    (name,) = [n for n in archive.namelist() if n.endswith("/METADATA")]
    return archive.read(name).decode()


def main() -> None:
  cuda = sys.argv[1]
  dockerfile, *folders = [pathlib.Path(arg).resolve() for arg in sys.argv[2:]]
  (wheel,) = folders[1].glob("*.whl")
  nccl = f"nvidia-nccl-cu{cuda}"
  newest, oldest = re.search(
    rf"Requires-Dist: {nccl}<=(\S+),>=(\S+)", metadata(wheel)
  ).groups()

  def check(environment: Environment, report: str) -> None:
    folder = environment.site / f"jax_ep_cuda{cuda}"
    assert f"Its library is there, {folder / 'libep_ffi_cuda.so'}." in report
    # NCCL EP's compiler needs both folders of headers.
    code = "{}{:02}{:02}".format(*map(int, oldest.split(".")))
    header = (folder / "include/nccl.h").read_text()
    assert f"#define NCCL_VERSION_CODE {code}\n" in header
    assert (folder / "include/nccl_device/core.h").exists()

  with tempfile.TemporaryDirectory() as scratch:
    environment = Environment(pathlib.Path(scratch).resolve())
    wheels = pathlib.Path(scratch, "wheels")
    wheels.mkdir()
    write_wheel(wheels, "absl-py", "2.3.0", {})
    write_wheel(wheels, "nccl-extensions", "0.1.0", {})
    for version in (oldest, newest, _UNKNOWN):
      write_wheel(wheels, nccl, version, {})
    write_wheel(
      wheels,
      f"jax-cuda{cuda}-plugin",
      importlib.metadata.version("jax"),
      {f"jax_cuda{cuda}_plugin/__init__.py": b""},
      metadata=(
        "Provides-Extra: with-cuda\n"
        f'Requires-Dist: {nccl}>=2.18.1; extra == "with-cuda"\n'
      ),
    )
    found = [f"--find-links={folder}" for folder in (wheels, *folders)]

    def plan(*packages: str) -> dict[str, str]:
      """Returns the versions that pip would install."""
      environment.install(*found, "--dry-run", "--report=plan", *packages)
      installs = json.loads((environment.work / "plan").read_text())["install"]
      about = (install["metadata"] for install in installs)
      return {entry["name"]: entry["version"] for entry in about}

    jax, ours = f"jax[cuda{cuda}]", f"jax-ep-cuda{cuda}"
    for order in [(jax, ours), (ours, jax)]:
      assert plan(*order)[nccl] == newest
    # pip downgrades only an NCCL that ep_bootstrap refuses.
    for version, planned in [(newest, None), (_UNKNOWN, newest)]:
      environment.install(*found, jax, f"{nccl}=={version}")
      assert plan(ours).get(nccl) == planned
    environment.install(*found, f"jax-ep[cuda{cuda}]")
    assert nccl not in plan(jax)

    check(environment, environment.run("python", "-m", "ep", "info"))
    if cuda == "13":
      image = Environment(pathlib.Path(scratch, "image").resolve())
      for folder in folders:
        shutil.copytree(folder, image.work / "wheels", dirs_exist_ok=True)
      found = dict(PIP_FIND_LINKS=str(wheels))
      check(image, image.run_stage(dockerfile, "cuda13", **found))


if __name__ == "__main__":
  main()
