# SPDX-License-Identifier: Apache-2.0
"""Wheels and source archives of the package, built by Hatchling."""

load("@bazel_skylib//rules:common_settings.bzl", "BuildSettingInfo")

_CUDA = "//third_party/cuda:version"

def _with_cuda_impl(settings, attr):
    # The library for CPUs is the same with all, so it is not compiled once more.
    return {_CUDA: settings[_CUDA] if attr.cuda == "none" else attr.cuda}

# It builds the library of a wheel as --config=cuda12 would.
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
    attrs = {
        "cuda": attr.string(mandatory = True),
        "kind": attr.string(mandatory = True),
        "library": attr.label(cfg = _with_cuda),
        "package": attr.string(mandatory = True),
        "platform": attr.string(mandatory = True),
        "project": attr.label(allow_single_file = True, mandatory = True),
        "srcs": attr.label_list(allow_files = True),
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

def distribution(
        name,
        srcs,
        kind = "wheel",
        library = None,
        package = "ep",
        project = "pyproject.toml",
        glibc = "2_28",
        cuda = "none",
        **kwargs):
    """Builds a wheel or an sdist.

    The result is a folder of this name that has the file, so that neither its
    version nor its platform stands in a BUILD file.

    Args:
      name: of the target and of the folder.
      srcs: the sources, at their places.
      kind: "wheel" or "sdist".
      library: the native library, which goes into the package.
      package: the folder of the package.
      project: the project file; it may be a template.
      glibc: the oldest that the library runs with; manylinux_test checks it.
      cuda: the major version of CUDA that the library is built with, or "none".
      **kwargs: passed on to the rule.
    """
    _distribution(
        name = name,
        srcs = srcs,
        kind = kind,
        library = library,
        package = package,
        project = project,
        cuda = cuda,
        platform = select({
            "@platforms//cpu:{}".format(cpu): "manylinux_{}_{}".format(glibc, cpu)
            for cpu in ["aarch64", "x86_64"]
        }),
        **kwargs
    )
