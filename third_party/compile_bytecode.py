# SPDX-License-Identifier: Apache-2.0
"""Compiles the first half of the arguments, sources, to the second half."""

import py_compile
import sys

files = sys.argv[1:]
half = len(files) // 2
for source, compiled in zip(files[:half], files[half:], strict=True):
  py_compile.compile(
    source,
    compiled,
    doraise=True,
    # File times mean nothing in a build, and tests change copies of modules.
    invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH,
  )
