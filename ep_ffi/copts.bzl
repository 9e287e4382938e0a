# SPDX-License-Identifier: Apache-2.0
"""How the native code is compiled, wherever it is built from."""

EP_COPTS = [
    "-std=c++17",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    # A module that uses this one may compile all its code with -ffast-math.
    "-fno-fast-math",
    # A fused multiply-add rounds once where the contract rounds twice, and
    # whether a compiler fuses depends on the target. After -fno-fast-math, with
    # which Clang may go back to its own default.
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    # A module that uses this one may have -Werror; our own comes later.
    "-Wno-error",
] + select({
    # Bazel's default mode is for quick compilation, and without optimization
    # the engine is twenty times slower. -c opt optimizes by itself, and under
    # -c dbg nothing does.
    Label("//ep_ffi:fastbuild"): [
        "-O2",
        "-DNDEBUG",
    ],
    "//conditions:default": [],
})
