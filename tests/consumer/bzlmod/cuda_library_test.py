# SPDX-License-Identifier: Apache-2.0
"""Loads libep_ffi_cuda.so, built by a module that uses jax_ep.

    cuda_library_test.py libep_ffi_cuda.so

A machine without a GPU or a driver can load the library, which looks for both
when a process creates a group.
"""

import ctypes
import os
import sys

if __name__ == "__main__":
  library = ctypes.CDLL(os.path.abspath(sys.argv[1]))
  # One function of all backends, and one of the nccl backend.
  for name in "ep_interface_version", "ep_nccl_group_create":
    ctypes.cast(getattr(library, name), ctypes.c_void_p)
