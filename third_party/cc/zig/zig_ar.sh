#!/bin/bash
# SPDX-License-Identifier: Apache-2.0

# Runs the archiver of @ep_zig in Bazel's execution root.
exec external/*ep_zig/zig ar "$@"
