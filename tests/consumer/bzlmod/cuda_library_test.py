# SPDX-License-Identifier: Apache-2.0
"""The library for GPUs, built by a module that uses jax_ep, can be loaded.

    cuda_library_test.py libep_ffi_cuda.so

A machine without a GPU or a driver loads it, too: the library finds those when
a group is created.
"""

import ctypes
import os
import sys


def main() -> int:
  library = ctypes.CDLL(os.path.abspath(sys.argv[1]))
  # One function of all backends, and one of this one.
  for name in "ep_interface_version", "ep_nccl_group_create":
    ctypes.cast(getattr(library, name), ctypes.c_void_p)
  return 0


if __name__ == "__main__":
  sys.exit(main())
