# SPDX-License-Identifier: Apache-2.0
"""Tests that pip installs the wheel for CUDA, and ep finds its files.

Usage: extras_test.py CUDA FOLDER FOLDER

CUDA is a version, such as 13. The first FOLDER has the wheel of the package,
the second FOLDER has the wheel for CUDA. Empty wheels replace NVIDIA's packages
and JAX's plugin, which take gigabytes. pip resolves the requirements of the two
wheels, of the installed JAX, and of the plugin on NCCL.
"""

from collections.abc import Mapping
import importlib.metadata
import pathlib
import re
import sys
import tempfile
import zipfile

from environment import Environment

_WHEEL = """\
Wheel-Version: 1.0
Generator: jax-ep
Root-Is-Purelib: true
Tag: py3-none-any
"""


def write_wheel(
  folder: pathlib.Path,
  name: str,
  version: str,
  files: Mapping[str, bytes],
  metadata: str = "",
) -> None:
  """Writes a wheel of `files` (contents by path), with more metadata lines."""
  stem = f"{name.replace('-', '_')}-{version}"
  info = f"{stem}.dist-info"
  about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}"
  contents = {
    **files,
    f"{info}/METADATA": about.encode(),
    f"{info}/WHEEL": _WHEEL.encode(),
  }
  record = "".join(f"{path},,\n" for path in [*contents, f"{info}/RECORD"])
  with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
    for path, content in contents.items():
      wheel.writestr(path, content)
    wheel.writestr(f"{info}/RECORD", record)


def metadata(wheel: pathlib.Path) -> str:
  with zipfile.ZipFile(wheel) as archive:
    (name,) = [n for n in archive.namelist() if n.endswith("/METADATA")]
    return archive.read(name).decode()


def main() -> None:
  cuda = sys.argv[1]
  folders = [pathlib.Path(arg).resolve() for arg in sys.argv[2:]]
  (wheel,) = folders[1].glob("*.whl")
  nccl = f"nvidia-nccl-cu{cuda}"
  newest, oldest = re.search(
    rf"Requires-Dist: {nccl}<=(\S+),>=(\S+)", metadata(wheel)
  ).groups()
  with tempfile.TemporaryDirectory() as scratch:
    environment = Environment(pathlib.Path(scratch).resolve())
    wheels = pathlib.Path(scratch, "wheels")
    wheels.mkdir()
    write_wheel(wheels, "absl-py", "2.3.0", {})
    write_wheel(wheels, "nccl-extensions", "0.1.0", {})
    for version in (oldest, newest, "2.99.0"):  # ep_bootstrap refuses the last
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
    environment.install(*found, f"jax-ep[cuda{cuda}]")
    installed = environment.site.glob("nvidia_nccl_*.dist-info")
    assert [path.stem.rpartition("-")[2] for path in installed] == [newest]

    report = environment.run("python", "-m", "ep", "info")
    folder = environment.site / f"jax_ep_cuda{cuda}"
    assert f"Its library is there, {folder / 'libep_ffi_cuda.so'}." in report
    # NCCL EP's compiler needs both folders of headers.
    code = "{}{:02}{:02}".format(*map(int, oldest.split(".")))
    header = (folder / "include/nccl.h").read_text()
    assert f"#define NCCL_VERSION_CODE {code}\n" in header
    assert (folder / "include/nccl_device/core.h").exists()


if __name__ == "__main__":
  main()
