# SPDX-License-Identifier: Apache-2.0
"""Wheels that tests give to pip, in place of those of an index."""

from collections.abc import Mapping
import importlib.metadata
import pathlib
import zipfile

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
  """Writes a wheel of `files`, by their paths, with more lines of metadata."""
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


def pack(folder: pathlib.Path, name: str) -> None:
  """Writes the wheel of a package that this process can import."""
  found = importlib.metadata.distribution(name)
  files = {
    str(path): path.read_binary()
    for path in found.files or ()
    if path.parts[0] != ".." and path.suffix != ".pyc"
  }
  (info,) = {path.split("/")[0] for path in files if ".dist-info/" in path}
  with zipfile.ZipFile(folder / f"{info[:-10]}-py3-none-any.whl", "w") as wheel:
    for path, content in files.items():
      wheel.writestr(path, content)
