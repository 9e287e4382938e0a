#!/usr/bin/env bash
# Writes the lock files anew from the requirements.in beside them; needs uv
# (pip install uv). No address of an index gets into them.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../third_party"

lock() { # FOLDER PYTHON_VERSION LOCK [UV_ARGUMENT...]
  (cd "$1" && uv pip compile --quiet --upgrade --generate-hashes --no-header \
    --no-emit-index-url --no-emit-find-links --python-version "$2" \
    --output-file "$3" "${@:4}" requirements.in)
}

for version in 3.11 3.12 3.13 3.14; do
  lock py "$version" "requirements_lock_${version/./_}.txt"
done
lock tools 3.11 requirements_lock.txt --universal
