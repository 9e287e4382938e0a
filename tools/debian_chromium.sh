#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0

# Installs Debian's Chromium, without windows, into a private prefix, to look at
# the site with it; see debian_packages.sh for what that needs.
#
#   tools/debian_chromium.sh PREFIX && PREFIX/bin/chromium --version
#
#   EP_DEBIAN_SUITE    the release to take Chromium from
set -euo pipefail

readonly prefix=$(readlink -m "${1:?usage: debian_chromium.sh PREFIX}")
readonly stage=$prefix.partial
readonly suite=${EP_DEBIAN_SUITE:-forky}
. "${BASH_SOURCE[0]%/*}/debian_packages.sh"

# What draws with a GPU, and what a desktop wants, are left out: half of the bytes.
left_out='debconf|dpkg|tzdata|media-types|netbase|perl.*|libperl.*|x11-.*|xdg-.*'
left_out+='|libllvm.*|libz3.*|mesa-.*|libgl1.*|libglx.*|libvulkan.*|libdrm-.*'
unpack_packages "$left_out" \
  chromium-headless-shell fonts-dejavu-core fonts-liberation patchelf
readonly root=$stage/root shell=usr/lib/chromium/chromium-headless-shell
fit_programs "" "$root/$shell"
pulse=("$root"/usr/lib/*/pulseaudio) # a library looks there by a path of its own

cat >"$stage/fonts.conf" <<EOF
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
  <dir>$prefix/root/usr/share/fonts</dir>
  <cachedir>$prefix/fonts</cachedir>
</fontconfig>
EOF
cat >"$stage/bin/chromium" <<EOF
#!/bin/sh
export FONTCONFIG_FILE=$prefix/fonts.conf
export LD_LIBRARY_PATH=$(here "${pulse[0]}")
exec $prefix/root/$shell "\$@"
EOF
chmod +x "$stage/bin/chromium"
finish "$prefix/bin/chromium"
