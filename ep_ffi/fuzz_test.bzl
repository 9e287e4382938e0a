# SPDX-License-Identifier: Apache-2.0
"""A test that runs a fuzz target without a fuzzer."""

load("@rules_cc//cc:cc_library.bzl", "cc_library")
load("@rules_cc//cc:cc_test.bzl", "cc_test")
load(":copts.bzl", "EP_COPTS")

def fuzz_test(name, src, iterations, deps):
    """Declares a test that runs a target on its seeds and mutants of them.

    The library <name>_target is the target alone, LLVMFuzzerTestOneInput, for
    libFuzzer to link.

    Args:
      name: The name of the test.
      src: The file of the target.
      iterations: The number of mutants. To run more or others:
        --test_arg=--iterations=100000 --test_arg=--seed=2
      deps: The libraries that the target includes.
    """
    cc_library(
        name = name + "_target",
        testonly = True,
        srcs = [src],
        copts = EP_COPTS,
        alwayslink = True,  # the driver finds it by name
        deps = deps + ["//ep_ffi/testing:fuzz"],
    )
    cc_test(
        name = name,
        size = "small",
        args = ["--iterations={}".format(iterations)],
        linkstatic = True,
        deps = [
            name + "_target",
            "//ep_ffi/testing:fuzz_driver",
        ],
    )
