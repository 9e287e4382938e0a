#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0

# Writes the lock files again from the requirements beside them. It needs uv
# (pip install uv). The locks contain no address of an index.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../third_party"

lock() { # REQUIREMENTS PYTHON_VERSION LOCK [UV_ARGUMENT...]
  (cd "${1%/*}" && uv pip compile --quiet --upgrade --generate-hashes \
    --no-header --no-emit-index-url --no-emit-find-links \
    --python-version "$2" --output-file "$3" "${@:4}" "${1##*/}")
}

for version in 3.11 3.12 3.13 3.14; do
  python=${version/./_}
  base="requirements_lock_$python.txt"
  lock py/requirements.in "$version" "$base"
  mapfile -t held < <(sed -n 's/^\(.*\)==.*/--no-emit-package=\1/p' "py/$base")
  lock py/requirements_examples.in "$version" \
    "requirements_examples_lock_$python.txt" \
    --only-binary :all: --constraints "$base" "${held[@]}"
  for cuda in 12 13; do
    lock "py/requirements_cuda$cuda.in" "$version" \
      "requirements_lock_cuda${cuda}_$python.txt" \
      --python-platform x86_64-manylinux_2_28 --constraints "$base" "${held[@]}"
  done
done
for version in 12 13; do
  lock "cuda/requirements_cuda$version.in" 3.11 \
    "requirements_lock_cuda$version.txt" --no-deps
done
for tools in docs tools; do
  lock "$tools/requirements.in" 3.11 requirements_lock.txt --universal
done
