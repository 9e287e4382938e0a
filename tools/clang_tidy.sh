#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0

# Runs clang-tidy (pip install clang-tidy) on the C++ sources that need no CUDA,
# with the checks of .clang-tidy. Python must have jaxlib, for XLA's headers.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

xla=$(python3 -c "import jaxlib; print(jaxlib.__path__[0])")/include
mapfile -t sources < <(
  git ls-files 'ep_ffi/core/*.cc' 'ep_ffi/handlers/*.cc' 'ep_ffi/matmul/*.cc' \
    'ep_ffi/backends/host/*.cc' |
    grep -v '_test\.cc$\|/testing/\|/fuzz/'
)
clang-tidy --quiet "${sources[@]}" -- -std=c++17 -I. -isystem "$xla"
