# SPDX-License-Identifier: Apache-2.0
"""How the native code is compiled, wherever it is built from."""

EP_COPTS = [
    "-std=c++17",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    # A module that uses this one may compile all its code with -ffast-math.
    "-fno-fast-math",
    # A fused multiply-add rounds once where the contract rounds twice, and
    # whether a compiler fuses depends on the target. This must come after
    # -fno-fast-math, with which Clang may go back to its own default.
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    # A module that uses this one may have -Werror; that of our .bazelrc comes
    # later and counts.
    "-Wno-error",
] + select({
    Label("@rules_cc//cc/compiler:clang"): [
        # Clang takes XLA's headers for ours, since Bazel passes the root of
        # their repository with -iquote as well.
        "--system-header-prefix=xla/",
        # NCCL's macros initialize some fields and leave out the others.
        "-Wno-missing-field-initializers",
    ],
    "//conditions:default": [],
}) + select({
    # Bazel's default mode is for quick compilation, but without optimization
    # the engine is twenty times slower. Of the other modes, -c opt optimizes by
    # itself and -c dbg should not.
    Label("//ep_ffi:fastbuild"): [
        "-O2",
        "-DNDEBUG",
    ],
    "//conditions:default": [],
})

# Compiling a test, and most of its support, takes longer than running it.
EP_TEST_COPTS = EP_COPTS + ["-O0"]
