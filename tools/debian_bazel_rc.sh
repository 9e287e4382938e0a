#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0

# Configures a Debian Bazel: writes its registry, its rc file and its wrapper.
# The script is the last step of debian_bazel.sh.
#
#   tools/debian_bazel_rc.sh STAGE PREFIX
#
# STAGE/root has the unpacked packages. The caller renames STAGE to PREFIX.
set -euo pipefail

readonly stage=$1 prefix=$2

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
readonly pip=("$stage"/root/usr/share/python-wheels/pip-*.whl)
readonly jres=("$stage"/root/usr/lib/jvm/java-*-openjdk-*)
registry=$(python3 -c \
  'import pathlib, sys; print(pathlib.Path(sys.argv[1]).as_uri())' \
  "$prefix/registry")
{
  option startup "--install_base=$base"
  option startup --trust_install_base
  option startup "--server_javabase=$prefix${jres[0]#"$stage"}"
  # A server that runs for minutes does not profit from optimized JIT code.
  option startup "--host_jvm_args=-XX:TieredStopAtLevel=1"
  option common "--registry=$registry"
  # The sandbox hides /tmp, and the prefix may be there.
  option common "--sandbox_add_mount_pair=$prefix"
  # The python3 of some hosts has no pip.
  option common "--repo_env=EP_PIP_WHEEL=$prefix${pip[0]#"$stage"}"
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
