#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0

# Updates the lock files from the requirements beside them. Needs uv
# (pip install uv). A lock has environment markers for every Python version, and
# no address of an index.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../third_party"

lock() { # REQUIREMENTS LOCK [UV_ARGUMENT...]
  (cd "${1%/*}" && uv pip compile --quiet --upgrade --generate-hashes \
    --no-header --no-emit-index-url --no-emit-find-links --universal \
    --python-version 3.11 --output-file "$2" "${@:3}" "${1##*/}")
}

readonly base=requirements_lock.txt
lock py/requirements.in "$base"
mapfile -t held < <(
  sed -n 's/^\([^ ]*\)==.*/--no-emit-package=\1/p' "py/$base" | sort -u
)
lock py/requirements_examples.in requirements_examples_lock.txt \
  --only-binary :all: --constraints "$base" "${held[@]}"
for platform in cuda12 cuda13 tpu; do
  lock "py/requirements_$platform.in" "requirements_lock_$platform.txt" \
    --constraints "$base" "${held[@]}"
done
for cuda in 12 13; do
  lock "cuda/requirements_cuda$cuda.in" "requirements_lock_cuda$cuda.txt" --no-deps
done
for tools in docs tools; do
  lock "$tools/requirements.in" requirements_lock.txt
done
