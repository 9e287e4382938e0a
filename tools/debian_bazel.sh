#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0

# Installs Debian's packaged Bazel into a private prefix, for hosts that reach a
# Debian mirror but not GitHub. debian_packages.sh lists the required programs.
#
#   tools/debian_bazel.sh PREFIX && PREFIX/bin/bazel --version
#
# The script builds PREFIX.partial, whose files contain PREFIX's paths, and renames
# it to PREFIX at the end. So PREFIX is complete if it exists.
#
#   EP_DEBIAN_SUITE    the Debian release of Bazel
set -euo pipefail

readonly prefix=$(readlink -m "${1:?usage: debian_bazel.sh PREFIX}")
readonly stage=$prefix.partial
readonly suite=${EP_DEBIAN_SUITE:-forky} # the first Debian with Bazel 7
. "${BASH_SOURCE[0]%/*}/debian_packages.sh"

# Leave out compilers and interpreters, because the host has its own, and the JDK,
# because Bazel's server needs only the runtime.
left_out='build-essential|.*-jdk-headless|python3(-minimal|\..*)?|libpython3.*'
left_out+='|(binutils|cpp|g\+\+|gcc|perl|dpkg).*|make|linux-libc-dev'
left_out+='|libc6-dev|libc-dev-bin|lib(gcc|stdc\+\+)-.*-dev|libperl.*'
left_out+='|libdpkg-perl|lib[a-z]*san[0-9]+'
unpack_packages "$left_out" bazel-bootstrap patchelf python3-pip-whl

readonly root=$stage/root
jres=("$root"/usr/lib/jvm/java-*-openjdk-*)
jre=${jres[0]}
fit_programs ":$(here "$jre/lib"):$(here "$jre/lib/server")" \
  "$root"/usr/bin/bazel "$root"/usr/libexec/*/bazel/* \
  "$jre/bin/java" "$jre/lib/jspawnhelper"

# Debian's files contain absolute paths: in links, in the server's class path and in
# the manifests of its jars. With a rewritten class path the server does not follow
# the manifests, so this program follows them.
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
    """Yields the jars in the manifest of `jar`, as paths below the stage."""
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
for jar in jars:  # the loop appends to the list
    if os.path.exists(jar):
        jars += [j for j in class_path(jar) if j not in jars and os.path.exists(j)]
listing.write_text("".join(final + j[len(stage):] + "\n" for j in jars))
PY

"${BASH_SOURCE[0]%/*}/debian_bazel_rc.sh" "$stage" "$prefix"
finish "$prefix/bin/bazel"
