#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0

# Writes all files of a release to a new folder:
#
#   tools/release.sh FOLDER OWNER/REPO
#
#   jax_ep-<version>-source.tar.gz  the source archive of HEAD; the same commit
#                                   gives the same bytes
#   *.whl, the sdist                the distributions for PyPI from //:all
#   SHA256SUMS                      the checksums of these files
#   NOTES.md                        the section of CHANGELOG.md
#
# The script publishes nothing. OWNER/REPO is the repository on GitHub whose
# release v<version> will have the files. If the release is not ready, the script
# fails before it builds anything; see release.py.
set -euo pipefail

readonly usage="usage: release.sh FOLDER OWNER/REPO"
folder=$(readlink -m "${1:?$usage}")
repository=${2:?$usage}
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

die() {
  echo "release.sh: $*" >&2
  exit 1
}
[[ $# == 2 ]] || die "$usage"
[[ ! -e $folder ]] || die "$folder exists already; name a new folder."
[[ -z $(git status --porcelain) ]] ||
  die "the tree differs from HEAD, which the archive is made of; commit first."

version=$(python3 tools/release.py version)
notes=$(python3 tools/release.py notes)
archive=$folder/jax_ep-$version-source.tar.gz
mkdir -p "$folder"
git -c tar.umask=0022 archive --prefix="jax_ep-$version/" HEAD |
  gzip --best --no-name >"$archive"

# Each distribution target builds a folder with one file.
sources=https://github.com/$repository/blob/v$version
distributions=$(./bazelw query 'kind("_distribution rule", //:all)')
for target in $distributions; do
  ./bazelw build --//docs:source_url="$sources" "$target"
  cp "bazel-bin/${target#//:}"/* "$folder"
done

cd "$folder"
for file in *; do
  [[ $file == *-"$version"[-.]* ]] || die "$file is not of version $version."
done
sha256sum -- * >SHA256SUMS
echo "$notes" >NOTES.md
