#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0

# Formats every file that git knows of, or with --check tells which need it.
# The formatters are pinned in third_party/tools and installed by Bazel.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
exec ./bazelw run --noshow_progress --ui_event_filters=-info //tools:format -- "$@"
