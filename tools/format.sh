#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0

# Runs all pre-commit hooks on all tracked files. Fails if a hook changes a
# file.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

readonly version=4.7.0
readonly venv=${XDG_CACHE_HOME:-$HOME/.cache}/jax_ep/pre-commit-$version
if [[ ! -x $venv/bin/pre-commit ]]; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet "pre-commit==$version"
fi
# No bytecode: mypy only reads JAX, and no program imports most packages.
PIP_COMPILE=0 exec "$venv/bin/pre-commit" run --all-files
