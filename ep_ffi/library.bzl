# SPDX-License-Identifier: Apache-2.0
"""How a library that Python loads is linked."""

load("@rules_cc//cc:cc_binary.bzl", "cc_binary")
load(":copts.bzl", "EP_COPTS")

def ep_library(name, deps, srcs = []):
    """C functions, such as the FFI handlers, and a backend in a shared library.

    It serves every Python version: it is loaded with ctypes and knows nothing
    of Python.

    Args:
      name: of the file, libep_ffi_<platform>.so.
      deps: the platform's handlers and backends.
      srcs: what else there is.
    """
    cc_binary(
        name = name,
        srcs = srcs,
        additional_linker_inputs = ["//ep_ffi:exports.lds"],
        copts = EP_COPTS,
        linkopts = [
            "-Wl,--version-script=$(location //ep_ffi:exports.lds)",
            "-Wl,--no-undefined",
            "-pthread",
        ],
        linkshared = True,
        visibility = ["//visibility:public"],
        deps = deps,
    )
