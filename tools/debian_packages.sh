#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0

# Functions that unpack Debian packages into a private prefix, for
# debian_bazel.sh and debian_python.sh. The functions need apt-get, dpkg-deb and
# python3, but not root, and neither use nor change the packages of the host.
#
# The caller sets `prefix`, `stage`, a folder that the caller later renames to
# `prefix`, and `suite`, the Debian release of the packages.
#
#   EP_DEBIAN_MIRROR   the mirror (default: the mirror of the host)

say() { printf '%s: %s\n' "$(basename "$0" .sh)" "$*" >&2; }
die() {
  say "$*"
  exit 1
}

# Unpacks the packages $2... and their dependencies into $stage/root. Leaves out
# packages whose whole name matches the regular expression $1.
unpack_packages() {
  local left_out=$1 apt=$stage/apt mirror packages
  local keyring=/usr/share/keyrings/debian-archive-keyring.gpg
  for tool in apt-get dpkg-deb python3; do
    command -v "$tool" >/dev/null ||
      die "$tool is missing, so Debian's packages cannot be unpacked here."
  done
  mirror=${EP_DEBIAN_MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' |
    grep -m1 -E '/debian/?$' || true)}
  [[ $mirror ]] || die "apt knows no Debian mirror; name one: EP_DEBIAN_MIRROR=…"
  rm -rf "$stage"
  mkdir -p "$stage"/{root,bin} "$apt"/{lists,archives}/partial

  # Run apt on an empty system, so that it computes all dependencies and keeps
  # its state in the stage.
  : >"$apt/status"
  echo "deb [signed-by=$keyring] $mirror $suite main" >"$apt/sources.list"
  apt_get() {
    apt-get -qq \
      -o Dir::State="$apt" -o Dir::State::Lists="$apt/lists" \
      -o Dir::State::status="$apt/status" \
      -o Dir::Cache="$apt" -o Dir::Cache::archives="$apt/archives" \
      -o Dir::Etc::SourceList="$apt/sources.list" \
      -o Dir::Etc::SourceParts=/dev/null \
      -o Acquire::Languages=none -o APT::Install-Recommends=false \
      -o APT::Sandbox::User=root \
      -o Debug::NoLocking=1 "$@"
  }
  say "reading the package lists of Debian $suite"
  apt_get update ||
    die "the mirror did not answer for '$suite'; see apt's message above."
  packages=$(apt_get -s install "${@:2}" |
    awk '$1 == "Inst" { print $2 }' | grep -vxE "$left_out")
  say "downloading $(wc -w <<<"$packages") packages"
  # shellcheck disable=SC2086 # one argument per package
  (cd "$apt/archives" && apt_get download $packages) ||
    die "a download failed; see apt's message above, and run this again."
  say "unpacking"
  printf '%s\0' "$apt"/archives/*.deb |
    xargs -0 -n1 -P"$(nproc)" sh -c 'dpkg-deb -x "$1" "$0"' "$stage/root"
  rm -rf "$apt"
}

# Prints the path of a file in the stage after the stage has been renamed.
here() { printf '%s' "${1/#"$stage"/"$prefix"}"; }

# Makes each program of $2... use the loader and the libraries of the prefix,
# because the host's C library is older. $1 lists more folders of libraries, each
# after a colon.
fit_programs() {
  local more=$1 loaders lib program old
  loaders=("$stage"/root/usr/lib/*/ld-linux-*.so.*)
  lib=${loaders[0]%/*}
  patchelf() {
    "${loaders[0]}" --library-path "$lib" "$stage/root/usr/bin/patchelf" "$@"
  }
  for program in "${@:2}"; do
    [[ -f $program ]] || continue
    old=$(patchelf --print-rpath "$program")
    # Set DT_RPATH, because DT_RUNPATH does not apply to the dependencies of
    # libraries. patchelf 0.18 makes overlapping segments in Python unless it sets
    # the interpreter afterwards.
    patchelf --force-rpath --set-rpath "$(here "$lib")$more${old:+:$old}" "$program"
    patchelf --set-interpreter "$(here "${loaders[0]}")" "$program"
  done
}

# Renames the complete stage to the prefix, and checks that the program $1 runs.
finish() {
  rm -rf "$prefix"
  mv "$stage" "$prefix"
  version=$("$1" --version) ||
    die "what was installed in $prefix does not run; see the message above."
  say "$version is in $prefix"
}
