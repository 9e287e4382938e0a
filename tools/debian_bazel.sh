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

# Debian's rule sets replace the modules of a C++ and Python build, in any
# version. Bazel's own MODULE file names other modules, which such a build never
# loads. The registry has stubs of these modules.
stub() {
  local dir=$stage/registry/modules/$1/$2
  mkdir -p "$dir"
  echo "module(name = \"$1\", version = \"$2\")" >"$dir/MODULE.bazel"
  echo '{"type": "local_path", "path": "/nonexistent"}' >"$dir/source.json"
}
mkdir -p "$stage"/{bin,registry}
echo '{}' >"$stage/registry/bazel_registry.json"
stub apple_support 1.23.1
stub buildozer 7.1.2
stub protobuf 3.19.6
stub protobuf 21.7
stub zlib 1.3.1.bcr.3

# Prints a line of the rc file: the option $2 of the command $1. Quotes the option,
# because the path of a home folder may contain a space.
option() {
  local quoted=${2//\\/\\\\}
  printf '%s "%s"\n' "$1" "${quoted//\"/\\\"}"
}

readonly base=$prefix/root/usr/share/bazel
readonly pip=("$root"/usr/share/python-wheels/pip-*.whl)
registry=$(python3 -c \
  'import pathlib, sys; print(pathlib.Path(sys.argv[1]).as_uri())' \
  "$prefix/registry")
{
  option startup "--install_base=$base"
  option startup --trust_install_base
  option startup "--server_javabase=$(here "$jre")"
  # A server that runs for minutes does not profit from optimized JIT code.
  option startup "--host_jvm_args=-XX:TieredStopAtLevel=1"
  option common "--registry=$registry"
  # The sandbox hides /tmp, and the prefix may be there.
  option common "--sandbox_add_mount_pair=$prefix"
  # The python3 of some hosts has no pip.
  option common "--repo_env=EP_PIP_WHEEL=$(here "${pip[0]}")"
  for module in bazel_features:tools/features bazel_skylib:tools/skylib \
    platforms:tools/platforms rules_cc:rules/cc rules_java:rules/java \
    rules_license:rules/license rules_proto:rules/proto \
    rules_python:rules/python; do
    option common "--override_module=${module%:*}=$base/${module#*:}"
    option common "--override_repository=${module%:*}=$base/${module#*:}"
  done
} >"$stage/bazelrc"

cat >"$stage/bin/bazel" <<'SH'
#!/usr/bin/env bash
here=$(readlink -f "$0")
prefix=${here%/bin/bazel}
exec "$prefix/root/usr/bin/bazel" --nosystem_rc --bazelrc="$prefix/bazelrc" "$@"
SH
chmod +x "$stage/bin/bazel"
finish "$prefix/bin/bazel"
