# SPDX-License-Identifier: Apache-2.0
"""C++ libraries whose sources are compiled as one, or each by itself."""

load("@rules_cc//cc:cc_library.bzl", "cc_library")
load(":cc_tests.bzl", "cc_tests")
load(":copts.bzl", "EP_COPTS", "EP_TEST_COPTS")

def ep_cc_library(
        name,
        srcs,
        alone = [],
        copts = [],
        optimized = True,
        textual_hdrs = [],
        **kwargs):
    """Declares a cc_library.

    A compiler spends most of its time on headers that many sources include. So
    Bazel compiles one source that includes those of the library, in half the
    time. In the mode opt it optimizes each source by itself: many cores are done
    sooner, and a source that does not include what it uses does not compile.

    Args:
      name: The name of the library.
      srcs: The sources and private headers.
      alone: Sources which others cannot be compiled with.
      copts: Further options of the compiler.
      optimized: Whether the time to compile it is worth it.
      textual_hdrs: The headers that do not compile on their own.
      **kwargs: passed on to cc_library.
    """
    sources = [src for src in srcs if src.endswith(".cc")]
    headers = [src for src in srcs if src not in sources]
    including = name + "_sources.cc"
    native.genrule(
        name = name + "_sources",
        outs = [including],
        cmd = "printf '#include \"%s\"\\n' {} > $@".format(" ".join([
            native.package_name() + "/" + source
            for source in sources
        ])),
    )
    mode = Label("//ep_ffi:opt")
    cc_library(
        name = name,
        srcs = headers + alone + select(
            {"//conditions:default": [including]} |
            ({mode: sources} if optimized else {}),
        ),
        copts = (EP_COPTS if optimized else EP_TEST_COPTS) + copts,
        linkstatic = True,  # EP_COPTS hide its symbols from other libraries
        textual_hdrs = textual_hdrs + select(
            {"//conditions:default": sources} |
            ({mode: []} if optimized else {}),
        ),
        **kwargs
    )

def cc_folder(name, deps, visibility, alone = [], test_deps = [], textual_hdrs = []):
    """Declares a library of all sources in the folder, and their tests.

    The target `sources` has the sources of the library, for //:sdist.

    Args:
      name: The name of the library.
      deps: What the library depends on.
      visibility: The packages that may depend on it.
      alone: Sources which others cannot be compiled with.
      test_deps: What the tests depend on besides.
      textual_hdrs: The headers that do not compile on their own.
    """
    native.filegroup(
        name = "sources",
        srcs = native.glob(
            [
                "*.cc",
                "*.h",
            ],
            exclude = ["*_test.cc"],
        ),
        visibility = ["//ep_ffi:__subpackages__"],
    )
    ep_cc_library(
        name = name,
        srcs = native.glob(["*.cc"], exclude = alone + ["*_test.cc"]),
        hdrs = native.glob(["*.h"], exclude = textual_hdrs),
        alone = alone,
        linkopts = ["-pthread"],
        textual_hdrs = textual_hdrs,
        visibility = visibility,
        deps = deps,
    )
    cc_tests(
        srcs = native.glob(["*_test.cc"]),
        deps = deps + test_deps + [name],
    )
