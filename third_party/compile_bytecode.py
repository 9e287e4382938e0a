# SPDX-License-Identifier: Apache-2.0
"""Compiles Python files. Usage: compile_bytecode.py SOURCE... OUTPUT..."""

import py_compile
import sys

files = sys.argv[1:]
half = len(files) // 2
for source, compiled in zip(files[:half], files[half:], strict=True):
  py_compile.compile(
    source,
    compiled,
    doraise=True,
    # Check hashes: file times mean nothing in a build, and tests edit copies.
    invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH,
  )
