# SPDX-License-Identifier: Apache-2.0
"""Compiler options of the native code."""

EP_COPTS = [
    "-std=c++17",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    # A module that depends on this one may set -ffast-math.
    "-fno-fast-math",
    # A fused multiply-add rounds once where the numeric contract rounds twice.
    # This option must come after -fno-fast-math, which may reset it in Clang.
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    # A module that depends on this one may set -Werror. Our .bazelrc sets
    # -Werror after this option.
    "-Wno-error",
] + select({
    Label("@rules_cc//cc/compiler:clang"): [
        # Bazel also passes the root of XLA's repository with -iquote, so Clang
        # would not treat XLA's headers as system headers.
        "--system-header-prefix=xla/",
        # NCCL's macros initialize only some fields.
        "-Wno-missing-field-initializers",
    ],
    "//conditions:default": [],
}) + select({
    # Bazel's default mode does not optimize, and the host engine would be
    # twenty times slower. -c opt already optimizes, and -c dbg should not.
    Label("//ep_ffi:fastbuild"): [
        "-O2",
        "-DNDEBUG",
    ],
    "//conditions:default": [],
})

# Compiling a test, and most of its support, takes longer than running it.
EP_TEST_COPTS = EP_COPTS + ["-O0"]
