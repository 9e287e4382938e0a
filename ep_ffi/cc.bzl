# SPDX-License-Identifier: Apache-2.0
"""C++ libraries and tests with our options."""

load("@rules_cc//cc:cc_library.bzl", "cc_library")
load("@rules_cc//cc:cc_test.bzl", "cc_test")
load(":copts.bzl", "EP_COPTS", "EP_TEST_COPTS")

def ep_cc_library(name, copts = EP_COPTS, **kwargs):
    """Declares a cc_library.

    Args:
      name: The name of the library.
      copts: The options of the compiler.
      **kwargs: passed on to cc_library.
    """
    cc_library(
        name = name,
        copts = copts,
        linkstatic = True,  # EP_COPTS hide its symbols from other libraries
        **kwargs
    )

def cc_tests(srcs, deps, size = "small"):
    """Declares a cc_test of the same name for each file.

    Args:
      srcs: The files, each foo_test.cc.
      deps: The libraries that they test. GoogleTest, its main() and
        expect.h are added.
      size: The size of each test, as Bazel defines it.
    """
    for src in srcs:
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
