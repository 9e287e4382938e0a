#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0

# Writes the lock files anew from the requirements beside them; needs uv (pip
# install uv). No address of an index gets into them.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../third_party"

lock() { # REQUIREMENTS PYTHON_VERSION LOCK [UV_ARGUMENT...]
  (cd "${1%/*}" && uv pip compile --quiet --upgrade --generate-hashes \
    --no-header --no-emit-index-url --no-emit-find-links \
    --python-version "$2" --output-file "$3" "${@:4}" "${1##*/}")
}

for version in 3.11 3.12 3.13 3.14; do
  lock py/requirements.in "$version" "requirements_lock_${version/./_}.txt"
done
for version in 12 13; do
  lock "cuda/requirements_cuda$version.in" 3.11 \
    "requirements_lock_cuda$version.txt" --no-deps
  # The same wheels for every Python, or hashes of those for each.
  lock "py/requirements_cuda$version.in" 3.11 \
    "requirements_lock_cuda$version.txt" --python-platform x86_64-manylinux_2_28
done
lock tools/requirements.in 3.11 requirements_lock.txt --universal
