#!/bin/bash
# SPDX-License-Identifier: Apache-2.0

# Runs the C++ compiler of @ep_zig in Bazel's execution root.
export ZIG_LIB_DIR ZIG_GLOBAL_CACHE_DIR=${TMPDIR:-/tmp}/ep_zig
ZIG_LIB_DIR=$(echo external/*ep_zig/lib)
exec "${ZIG_LIB_DIR%lib}zig" c++ "$@"
