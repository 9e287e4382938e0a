#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0

# Installs QEMU, which runs programs for arm64, and arm64's C library into a
# private prefix. debian_packages.sh lists the required programs.
#
#   tools/debian_qemu.sh PREFIX
#   ./bazelw test --config=linux_arm64 --run_under=PREFIX/bin/qemu \
#     //ep_ffi/backends/host:group_test
#
# The script builds PREFIX.partial, and renames it to PREFIX at the end. So PREFIX
# is complete if it exists.
#
#   EP_DEBIAN_SUITE    the Debian release of QEMU
set -euo pipefail

readonly prefix=$(readlink -m "${1:?usage: debian_qemu.sh PREFIX}")
readonly stage=$prefix.partial
readonly suite=${EP_DEBIAN_SUITE:-forky} # also has the Python of CI
. "${BASH_SOURCE[0]%/*}/debian_packages.sh"

unpack_packages 'no package is left out' qemu-user libc6-arm64-cross
cat >"$stage/bin/qemu" <<EOF
#!/bin/sh
exec '$prefix/root/usr/bin/qemu-aarch64' \
  -L '$prefix/root/usr/aarch64-linux-gnu' "\$@"
EOF
chmod +x "$stage/bin/qemu"
finish "$prefix/bin/qemu"
