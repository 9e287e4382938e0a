# SPDX-License-Identifier: Apache-2.0
"""Wheels and source archives of the package, built by Hatchling."""

load("@bazel_skylib//rules:common_settings.bzl", "BuildSettingInfo")

_CUDA = "//third_party/cuda:version"

def _with_cuda_impl(settings, attr):
    # CUDA does not change the library for CPUs, so do not compile it again.
    return {_CUDA: settings[_CUDA] if attr.cuda == "none" else attr.cuda}

# Builds the library of a wheel for CUDA as --config=cuda12 or cuda13 does.
_with_cuda = transition(
    implementation = _with_cuda_impl,
    inputs = [_CUDA],
    outputs = [_CUDA],
)

def _path(file):
    """Returns a file's path in its repository."""
    path = file.short_path
    return path.split("/", 2)[2] if path.startswith("../") else path

def _distribution_impl(ctx):
    folder = ctx.actions.declare_directory(ctx.label.name)
    files = {_path(file): file for file in ctx.files.srcs}
    files["pyproject.toml"] = ctx.file.project
    for file in ctx.files.library:
        files["{}/{}".format(ctx.attr.package, file.basename)] = file
    for file in ctx.files.headers:
        files["{}/{}".format(ctx.attr.package, _path(file))] = file
    args = ctx.actions.args()
    args.add(ctx.attr.kind)
    args.add(folder.path)
    args.add(ctx.attr.platform, format = "--platform=%s")
    args.add(ctx.attr.cuda, format = "--substitute=CUDA=%s")
    source_url = ctx.attr._source_url[BuildSettingInfo].value
    args.add(source_url, format = "--source_url=%s")
    for path, file in files.items():
        args.add(file, format = path + "=%s")
    ctx.actions.run(
        executable = ctx.executable._build,
        arguments = [args],
        inputs = files.values(),
        outputs = [folder],
        mnemonic = "Distribution",
        progress_message = "Building %{label}",
    )
    return [DefaultInfo(files = depset([folder]))]

_distribution = rule(
    implementation = _distribution_impl,
    doc = "Builds a wheel or an sdist into a folder with its name.",
    attrs = {
        "cuda": attr.string(
            default = "none",
            doc = "The major version of CUDA of the library, or none.",
        ),
        "headers": attr.label(doc = "The headers for the folder of the package."),
        "kind": attr.string(default = "wheel", values = ["wheel", "sdist"]),
        "library": attr.label(cfg = _with_cuda),
        "package": attr.string(
            default = "ep",
            doc = "The folder of the package, for the library and the headers.",
        ),
        "platform": attr.string(mandatory = True),
        "project": attr.label(
            allow_single_file = True,
            default = "//:pyproject.toml",
            doc = "The project file, which may have placeholders.",
        ),
        "srcs": attr.label_list(
            allow_files = True,
            doc = "The sources, at their paths in the repository.",
        ),
        "_allowlist_function_transition": attr.label(
            default = "@bazel_tools//tools/allowlists/function_transition_allowlist",
        ),
        "_build": attr.label(
            default = "//release:build_distribution",
            cfg = "exec",
            executable = True,
        ),
        "_source_url": attr.label(default = "//docs:source_url"),
    },
)

def distribution(name, glibc = "2_28", **kwargs):
    """Builds a wheel or an sdist into a folder.

    The name of the file contains the version and the platform, so no BUILD file
    can name the file.

    Args:
      name: The name of the target and of the folder.
      glibc: The oldest supported glibc, which manylinux_test checks.
      **kwargs: Passed on to the rule.
    """
    _distribution(
        name = name,
        platform = select({
            "@platforms//cpu:{}".format(cpu): "manylinux_{}_{}".format(glibc, cpu)
            for cpu in ["aarch64", "x86_64"]
        }),
        **kwargs
    )
