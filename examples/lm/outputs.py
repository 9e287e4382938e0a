# SPDX-License-Identifier: Apache-2.0
"""Checks, before a run begins, that what it will write can be written."""

import pathlib
import tempfile


def check(flag: str, path: pathlib.Path, kind: str) -> None:
  """Creates a "folder" if it is missing; leaves a "file" as it is.

  Raises:
    OSError: it cannot be written; the sentence names the flag.
  """
  exists = path.exists()
  try:
    if kind == "folder":
      path.mkdir(parents=True, exist_ok=True)
      tempfile.TemporaryFile(dir=path).close()
    else:
      path.open("ab").close()
  except OSError as error:
    raise OSError(
      f"{flag}={path}: {error.strerror}; name a {kind} that can be written."
    ) from error
  if kind == "file" and not exists:
    path.unlink()
