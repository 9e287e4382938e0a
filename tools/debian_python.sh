#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0

# Installs Debian's newest Python into a private prefix, to test with it beside
# the host's own; see debian_packages.sh for what that needs.
#
#   tools/debian_python.sh PREFIX && PREFIX/bin/python3.14 --version
#   PATH=PREFIX/bin:$PATH ./bazelw test \
#     --repo_env=HERMETIC_PYTHON_VERSION=3.14 //tests/ops:dispatch_test
#
# PREFIX appears only when it is complete: the script builds PREFIX.partial,
# whose files contain PREFIX's paths, and renames it at the end.
#
#   EP_DEBIAN_SUITE    the release to take Python from
set -euo pipefail

readonly prefix=$(readlink -m "${1:?usage: debian_python.sh PREFIX}")
readonly stage=$prefix.partial
readonly suite=${EP_DEBIAN_SUITE:-forky} # the first to package Python 3.14
readonly python=python3.14
. "${BASH_SOURCE[0]%/*}/debian_packages.sh"

unpack_packages 'debconf|dpkg|tzdata|media-types|netbase' \
  "$python" libstdc++6 patchelf python3-pip-whl
readonly root=$stage/root
fit_programs "" "$root/usr/bin/$python"
ln -s "../root/usr/bin/$python" "$stage/bin/$python"
ln -s root/usr/lib "$stage/lib" # where a virtual environment looks for it

# Debian has pip as a wheel, which runs without installation. Python sees it
# here as it sees any package.
site=$root/usr/lib/python3/dist-packages
mkdir -p "$site"
python3 -m zipfile -e "$root"/usr/share/python-wheels/pip-*.whl "$site"
rm -f "$root/usr/lib/$python/EXTERNALLY-MANAGED" # this prefix is nobody's system
finish "$prefix/bin/$python"
