# SPDX-License-Identifier: Apache-2.0
"""A shared library that Python loads."""

load("@rules_cc//cc:cc_binary.bzl", "cc_binary")
load(":copts.bzl", "EP_COPTS")

def ep_library(name, deps):
    """Declares a shared library of the FFI handlers and a backend.

    It serves every Python version, since it is loaded with ctypes and does not
    depend on Python, and every system with glibc 2.28 or newer.

    Args:
      name: The name of the file, libep_ffi_<platform>.so.
      deps: The platform's handlers and backends.
    """
    cc_binary(
        name = name,
        srcs = ["//ep_ffi:older_runtimes.cc"],
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
