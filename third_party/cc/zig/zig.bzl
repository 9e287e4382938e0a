# SPDX-License-Identifier: Apache-2.0
"""Configures Bazel to run the C++ compiler of @ep_zig."""

load("@rules_cc//cc:action_names.bzl", "ACTION_NAMES", "ALL_CC_COMPILE_ACTION_NAMES", "ALL_CC_LINK_ACTION_NAMES")
load("@rules_cc//cc:cc_toolchain_config_lib.bzl", "feature", "flag_group", "flag_set", "tool_path")
load("@rules_cc//cc/common:cc_common.bzl", "cc_common")
load("@rules_cc//cc/toolchains:cc_toolchain_config_info.bzl", "CcToolchainConfigInfo")

_ZIG = Label("@ep_zig//:toolchain")

def _flags(name, actions, flags):
    return feature(
        name = name,
        enabled = name not in ["dbg", "opt"],  # --compilation_mode enables these
        flag_sets = [flag_set(
            actions = actions,
            flag_groups = [flag_group(flags = flags)],
        )],
    )

def _zig_config_impl(ctx):
    every = ALL_CC_COMPILE_ACTION_NAMES + ALL_CC_LINK_ACTION_NAMES
    return cc_common.create_cc_toolchain_config_info(
        ctx = ctx,
        abi_libc_version = "glibc",
        abi_version = "gnu",
        compiler = "clang",
        cxx_builtin_include_directories = [
            "%workspace%/{}/lib".format(_ZIG.workspace_root),
        ],
        features = [
            _flags("target", every, ["-target", ctx.attr.target]),
            # By default, Zig sanitizes code that it does not optimize.
            _flags("sanitize", every, ["-fno-sanitize=undefined"]),
            _flags("opt", ALL_CC_COMPILE_ACTION_NAMES, ["-O2", "-DNDEBUG"]),
            _flags("dbg", ALL_CC_COMPILE_ACTION_NAMES, ["-g"]),
            # Zig's C++ library has debug information.
            _flags("shared", [ACTION_NAMES.cpp_link_dynamic_library], ["-shared", "-Wl,-S"]),
            feature(name = "supports_pic", enabled = True),
        ],
        target_cpu = ctx.attr.target.split("-")[0],
        target_libc = "glibc",
        target_system_name = ctx.attr.target,
        tool_paths = [
            tool_path(name = name, path = path)
            for name, path in {
                "ar": "zig_ar.sh",
                "cpp": "zig_cxx.sh",
                "gcc": "zig_cxx.sh",
                "gcov": "/bin/false",
                "ld": "zig_cxx.sh",
                "nm": "/bin/false",
                "objdump": "/bin/false",
                "strip": "/bin/false",
            }.items()
        ],
        toolchain_identifier = ctx.attr.target,
    )

zig_config = rule(
    implementation = _zig_config_impl,
    attrs = {
        "target": attr.string(
            doc = "Processor, system and glibc: aarch64-linux-gnu.2.28",
            mandatory = True,
        ),
    },
    provides = [CcToolchainConfigInfo],
)
