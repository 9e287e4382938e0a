# SPDX-License-Identifier: Apache-2.0
"""Wheels that tests give to pip instead of the wheels of an index."""

from collections.abc import Mapping
import importlib.metadata
import pathlib
import re
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
  """Writes a wheel of `files`, by path, with additional lines of metadata."""
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
  """Writes wheels of an installed package and of its requirements.

  Skips requirements that are not installed, which are for another platform or
  Python.
  """
  try:
    found = importlib.metadata.distribution(name)
  except importlib.metadata.PackageNotFoundError:
    return
  files = [
    path
    for path in found.files or ()
    if path.parts[0] != ".." and path.suffix != ".pyc"
  ]
  (info,) = {p.parts[0] for p in files if p.parts[0].endswith(".dist-info")}
  stem = info.removesuffix(".dist-info")
  with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
    for path in files:
      wheel.writestr(str(path), path.read_binary())
  for requirement in found.requires or ():
    if "extra ==" not in requirement:
      pack(folder, re.match(r"[\w.-]+", requirement)[0])
