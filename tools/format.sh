#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0

# Formats every file that git tracks or would add. With --check it changes
# nothing and says which files need it. The formatters are pinned in
# third_party/tools, and Bazel installs them.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
exec ./bazelw run --noshow_progress --ui_event_filters=-info //tools:format -- "$@"
