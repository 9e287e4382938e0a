# SPDX-License-Identifier: Apache-2.0
"""Compiles Python sources, the first half of the arguments, to the second."""

import py_compile
import sys

files = sys.argv[1:]
half = len(files) // 2
for source, compiled in zip(files[:half], files[half:], strict=True):
  py_compile.compile(
    source,
    compiled,
    doraise=True,
    # Times of files mean nothing in a build, and tests change copies.
    invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH,
  )
