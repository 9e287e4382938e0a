# SPDX-License-Identifier: Apache-2.0
"""One GoogleTest target per C++ test file."""

load("@rules_cc//cc:cc_test.bzl", "cc_test")
load(":copts.bzl", "EP_COPTS")

def cc_tests(srcs, deps, size = "small"):
    """Declares a cc_test for each file, named like it.

    Args:
      srcs: the files, each foo_test.cc.
      deps: what they test; GoogleTest and its main() come on top.
      size: Bazel's, of each test.
    """
    for src in srcs:
        cc_test(
            name = src.removesuffix(".cc"),
            size = size,
            srcs = [src],
            copts = EP_COPTS,
            linkstatic = True,
            deps = deps + ["@ep_googletest//:gtest_main"],
        )
