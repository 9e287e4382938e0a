# SPDX-License-Identifier: Apache-2.0
"""A folder whose C++ sources are one library."""

load("@rules_cc//cc:cc_library.bzl", "cc_library")
load(":cc_tests.bzl", "cc_tests")
load(":copts.bzl", "EP_COPTS")

def cc_folder(name, deps, visibility, test_deps = [], textual_hdrs = []):
    """Declares a library of all sources in the folder, and their tests.

    The target `sources` has the sources of the library, for //:sdist.

    Args:
      name: The name of the library.
      deps: What the library depends on.
      visibility: The packages that may depend on it.
      test_deps: What the tests depend on besides.
      textual_hdrs: The headers that do not compile on their own.
    """
    srcs = native.glob(["*.cc"], exclude = ["*_test.cc"])
    native.filegroup(
        name = "sources",
        srcs = srcs + native.glob(["*.h"]),
        visibility = ["//ep_ffi:__subpackages__"],
    )
    cc_library(
        name = name,
        srcs = srcs,
        hdrs = native.glob(["*.h"], exclude = textual_hdrs),
        copts = EP_COPTS,
        linkopts = ["-pthread"],
        linkstatic = True,  # EP_COPTS hide its symbols from other libraries
        textual_hdrs = textual_hdrs,
        visibility = visibility,
        deps = deps,
    )
    cc_tests(
        srcs = native.glob(["*_test.cc"]),
        deps = deps + test_deps + [name],
    )
