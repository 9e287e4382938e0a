#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0

# Installs Debian's newest Python into a private prefix, for tests.
# debian_packages.sh lists the required programs.
#
#   tools/debian_python.sh PREFIX && PREFIX/bin/python3.14 --version
#   PATH=PREFIX/bin:$PATH ./bazelw test \
#     --repo_env=HERMETIC_PYTHON_VERSION=3.14 //tests/ops:dispatch_test
#
# The script builds PREFIX.partial, whose files contain PREFIX's paths, and renames
# it to PREFIX at the end. So PREFIX is complete if it exists.
#
#   EP_DEBIAN_SUITE    the Debian release of Python
set -euo pipefail

readonly prefix=$(readlink -m "${1:?usage: debian_python.sh PREFIX}")
readonly stage=$prefix.partial
readonly suite=${EP_DEBIAN_SUITE:-forky} # the first Debian with Python 3.14
readonly python=python3.14
. "${BASH_SOURCE[0]%/*}/debian_packages.sh"

unpack_packages 'debconf|dpkg|tzdata|media-types|netbase' \
  "$python" libstdc++6 patchelf python3-pip-whl
readonly root=$stage/root
fit_programs "" "$root/usr/bin/$python"
ln -s "../root/usr/bin/$python" "$stage/bin/$python"
ln -s root/usr/lib "$stage/lib" # virtual environments look for it here

# Debian has pip as a wheel. Unpack it where Python finds packages.
site=$root/usr/lib/python3/dist-packages
mkdir -p "$site"
python3 -m zipfile -e "$root"/usr/share/python-wheels/pip-*.whl "$site"
rm -f "$root/usr/lib/$python/EXTERNALLY-MANAGED" # apt does not manage the prefix
finish "$prefix/bin/$python"
