# SPDX-License-Identifier: Apache-2.0
"""Checks, before a run begins, that what it will write can be written."""

import pathlib
import tempfile


def check_folder(flag: str, path: pathlib.Path) -> None:
  """Creates a folder if it is missing.

  Raises:
    OSError: it cannot be created, or no file in it; the sentence names the
      flag.
  """
  try:
    path.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=path).close()
  except OSError as error:
    raise OSError(
      f"{flag}={path}: {error.strerror}; name a folder that can be written."
    ) from error


def check_file(flag: str, path: pathlib.Path) -> None:
  """Leaves a file as it is.

  Raises:
    OSError: the file cannot be written; the sentence names the flag.
  """
  exists = path.exists()
  try:
    path.open("ab").close()
  except OSError as error:
    raise OSError(
      f"{flag}={path}: {error.strerror}; name a file that can be written."
    ) from error
  if not exists:
    path.unlink()
