# SPDX-License-Identifier: Apache-2.0
"""A fuzz target, run without a fuzzer."""

load("@rules_cc//cc:cc_library.bzl", "cc_library")
load("@rules_cc//cc:cc_test.bzl", "cc_test")
load(":copts.bzl", "EP_COPTS")

def fuzz_test(name, src, corpus, iterations, deps):
    """Runs a target over its corpus and mutants of it.

    <name>_target is the target alone, for libFuzzer to link:
    LLVMFuzzerTestOneInput.

    Args:
      name: of the test.
      src: the file of the target.
      corpus: its seeds; those named good_* are accepted, the others are not.
      iterations: mutants in a plain run. For others:
        --test_arg=--iterations=100000 --test_arg=--seed=2
      deps: what the target includes.
    """
    cc_library(
        name = name + "_target",
        testonly = True,
        srcs = [src],
        copts = EP_COPTS,
        alwayslink = True,  # a fuzzer finds it by name
        deps = deps,
    )
    cc_test(
        name = name,
        size = "small",
        args = ["--iterations={}".format(iterations)] +
               ["$(rootpath {})".format(seed) for seed in corpus],
        data = corpus,
        linkstatic = True,
        deps = [
            name + "_target",
            "//ep_ffi/testing:fuzz_driver",
        ],
    )
