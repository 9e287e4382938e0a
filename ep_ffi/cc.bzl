# SPDX-License-Identifier: Apache-2.0
"""C++ rules with the options of this module."""

load("@rules_cc//cc:cc_binary.bzl", "cc_binary")
load("@rules_cc//cc:cc_library.bzl", "cc_library")
load("@rules_cc//cc:cc_test.bzl", "cc_test")
load(":copts.bzl", "EP_COPTS", "EP_TEST_COPTS")

def ep_cc_library(name, srcs = None, hdrs = None, copts = EP_COPTS, **kwargs):
    """Declares a cc_library.

    Args:
      name: The name of the library.
      srcs: The sources. Without srcs and hdrs, the library has all files of the
        folder but tests.
      hdrs: The headers.
      copts: The options of the compiler.
      **kwargs: passed on to cc_library.
    """
    if not srcs and not hdrs:
        srcs = native.glob(["*.cc"], exclude = ["*_test.cc"])
        hdrs = native.glob(["*.h"])
    cc_library(
        name = name,
        srcs = srcs,
        hdrs = hdrs,
        copts = copts,
        linkstatic = True,  # EP_COPTS hide its symbols from other libraries
        **kwargs
    )

def cc_tests(deps, srcs = None, size = "small"):
    """Declares a cc_test of the same name for each file.

    Args:
      deps: The libraries under test. The macro adds GoogleTest, its main()
        and expect.h.
      srcs: The files, each foo_test.cc; all such files of the folder if None.
      size: The size of each test, as Bazel defines it.
    """
    for src in srcs or native.glob(["*_test.cc"]):
        cc_test(
            name = src.removesuffix(".cc"),
            size = size,
            srcs = [src],
            copts = EP_TEST_COPTS,
            linkstatic = True,
            deps = deps + [
                "//ep_ffi/testing:expect",
                "@ep_googletest//:gtest_main",
            ],
        )

def ep_sources():
    """Declares a filegroup of this package's files that //:sdist packs."""
    native.filegroup(
        name = "sources",
        srcs = native.glob(
            ["*.cc", "*.h"],
            exclude = ["*_test.cc"],
        ),
        visibility = ["//ep_ffi:__subpackages__"],
    )

def ep_shared_library(name, deps):
    """Declares a shared library of the FFI handlers and a backend.

    ctypes loads the library, which does not link to Python. So the library
    serves every Python version, and every system with glibc 2.28 or newer.

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
