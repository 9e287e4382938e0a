#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0

# Installs Debian's packaged Bazel into a private prefix, for hosts that reach a
# Debian mirror but not GitHub. It needs apt-get, dpkg-deb and python3, but not
# root, and neither uses nor changes the host's own packages.
#
#   tools/debian_bazel.sh PREFIX && PREFIX/bin/bazel --version
#
# PREFIX appears only when it is complete: the script builds PREFIX.partial,
# whose files contain PREFIX's paths, and renames it at the end.
#
#   EP_DEBIAN_MIRROR   the mirror to download from (default: the host's own)
#   EP_DEBIAN_SUITE    the release to take Bazel from
set -euo pipefail

readonly prefix=$(readlink -m "${1:?usage: debian_bazel.sh PREFIX}")
readonly stage=$prefix.partial
readonly suite=${EP_DEBIAN_SUITE:-forky} # the first to package Bazel 7

say() { printf 'debian_bazel: %s\n' "$*" >&2; }
die() {
  say "$*"
  exit 1
}

for tool in apt-get dpkg-deb python3; do
  command -v "$tool" >/dev/null ||
    die "$tool is missing, so Debian's Bazel cannot be installed here."
done

mirror=${EP_DEBIAN_MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' |
  grep -m1 -E '/debian/?$' || true)}
[[ $mirror ]] || die "apt knows no Debian mirror; name one: EP_DEBIAN_MIRROR=…"

rm -rf "$stage"
mkdir -p "$stage"/{root,bin,registry,apt/lists/partial,apt/archives/partial}

# 1. The packages are Bazel and all its dependencies in a release newer than the
# host's. An apt that sees an empty system computes them and keeps its state in
# the stage.
readonly apt=$stage/apt
: >"$apt/status"
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
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

say "1/4 reading the package lists of Debian $suite"
apt_get update ||
  die "the mirror did not answer for '$suite'; see apt's message above."

# Compilers and interpreters are left out, because the host has its own. So is
# the JDK, because Bazel's server needs only the runtime.
left_out='build-essential|.*-jdk-headless|python3(-minimal|\..*)?|libpython3.*'
left_out+='|(binutils|cpp|g\+\+|gcc|perl|dpkg).*|make|linux-libc-dev'
left_out+='|libc6-dev|libc-dev-bin|lib(gcc|stdc\+\+)-.*-dev|libperl.*'
left_out+='|libdpkg-perl|lib[a-z]*san[0-9]+'
packages=$(apt_get -s install bazel-bootstrap patchelf python3-pip-whl |
  awk '$1 == "Inst" { print $2 }' | grep -vxE "$left_out")
say "2/4 downloading $(wc -w <<<"$packages") packages"
# shellcheck disable=SC2086 # one argument per package
(cd "$apt/archives" && apt_get download $packages) ||
  die "a download failed; see apt's message above, and run this again."

say "3/4 unpacking"
printf '%s\0' "$apt"/archives/*.deb |
  xargs -0 -n1 -P"$(nproc)" sh -c 'dpkg-deb -x "$1" "$0"' "$stage/root"
rm -rf "$apt"

# 2. Each program gets the prefix's own loader and libraries, because the host's
# C library is older than the one that the program was linked against.
say "4/4 fitting the programs to this host"
root=$stage/root
loaders=("$root"/usr/lib/*/ld-linux-*.so.*)
lib=${loaders[0]%/*}
jres=("$root"/usr/lib/jvm/java-*-openjdk-*)
jre=${jres[0]}
here() { printf '%s' "${1/#"$stage"/"$prefix"}"; } # the path after the rename

patchelf() {
  "${loaders[0]}" --library-path "$lib" "$root/usr/bin/patchelf" "$@"
}
for program in "$root"/usr/bin/bazel "$root"/usr/libexec/*/bazel/* \
  "$jre/bin/java" "$jre/lib/jspawnhelper"; do
  [[ -f $program ]] || continue
  old=$(patchelf --print-rpath "$program")
  # This sets DT_RPATH, because DT_RUNPATH does not hold for the libraries that
  # libraries need.
  patchelf --set-interpreter "$(here "${loaders[0]}")" --force-rpath --set-rpath \
    "$(here "$lib"):$(here "$jre/lib"):$(here "$jre/lib/server")${old:+:$old}" \
    "$program"
done

# Debian's files name each other by absolute path: in links, in the server's
# class path and in the manifests of its jars. With a rewritten class path the
# server does not follow the manifests, so this program follows them.
python3 - "$root" "$prefix/root" <<'PY'
import os
import pathlib
import re
import sys
import zipfile

stage, final = sys.argv[1:]
for folder, dirs, files in os.walk(stage):
    for name in dirs + files:
        path = os.path.join(folder, name)
        if os.path.islink(path) and os.readlink(path).startswith("/"):
            target = os.readlink(path)
            if os.path.lexists(stage + target):
                os.remove(path)
                os.symlink(os.path.relpath(stage + target, folder), path)


def class_path(jar):
    """Yields the jars that `jar`'s manifest names, as paths below the stage."""
    try:
        manifest = zipfile.ZipFile(jar).read("META-INF/MANIFEST.MF").decode()
    except KeyError:
        return
    manifest = re.sub(r"\r?\n ", "", manifest)  # folded lines
    match = re.search(r"^Class-Path: *(.*)$", manifest, re.MULTILINE)
    for entry in (match.group(1) if match else "").split():
        entry = entry.removeprefix("file:")
        base = stage if entry.startswith("/") else os.path.dirname(jar) + "/"
        yield os.path.normpath(base + entry)


listing = pathlib.Path(stage, "usr/share/bazel/bazel_classpath_debian_depends.txt")
jars = [stage + line for line in listing.read_text().split()]
for jar in jars:  # the list grows while it is walked
    if os.path.exists(jar):
        jars += [j for j in class_path(jar) if j not in jars and os.path.exists(j)]
listing.write_text("".join(final + j[len(stage):] + "\n" for j in jars))
PY

"${BASH_SOURCE[0]%/*}/debian_bazel_rc.sh" "$stage" "$prefix"

rm -rf "$prefix"
mv "$stage" "$prefix"
version=$("$prefix/bin/bazel" --version) ||
  die "what was installed in $prefix does not run; see the message above."
say "$version is in $prefix"
