# SPDX-License-Identifier: Apache-2.0
"""Reads bytes of real text as tokens."""

from collections.abc import Iterator
import os
import pathlib
import sysconfig

import numpy as np

VOCABULARY = 256  # a token is a byte


def standard_library() -> pathlib.Path:
  """Returns the folder of Python's sources, which every machine has."""
  return pathlib.Path(sysconfig.get_path("stdlib"))


def read(path: pathlib.Path, limit: int, least: int = 0) -> np.ndarray:
  """Returns the first bytes of a file, or of a folder's files in name order.

  Skips files with a zero byte, which are not text, and broken links.

  Args:
    limit: the largest number of bytes.
    least: the smallest number of bytes.

  Returns:
    int32 `[N]`, from 0 to 255.

  Raises:
    ValueError: the file does not exist, or has less than `least` bytes of text.
  """
  text = bytearray()
  for file in _files(path):
    content = file.read_bytes()
    if b"\0" not in content:
      text += content
    if len(text) >= limit:
      break
  if len(text) < least:
    raise ValueError(
      f"{path} holds {len(text)} bytes of text, but {least} are wanted; name"
      " another file or folder, or ask for fewer tokens."
    )
  return np.frombuffer(text, np.uint8)[:limit].astype(np.int32)


def _files(path: pathlib.Path) -> Iterator[pathlib.Path]:
  if not path.exists():
    raise ValueError(f"{path} does not exist; name a file or folder of text.")
  if not path.is_dir():
    yield path
  for folder, folders, files in os.walk(path):
    folders.sort()
    for name in sorted(files):
      file = pathlib.Path(folder, name)
      if file.exists():
        yield file
