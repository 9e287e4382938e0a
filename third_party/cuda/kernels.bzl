# SPDX-License-Identifier: Apache-2.0
"""CUDA kernels, compiled ahead of time and embedded in a cc_library."""

load("//ep_ffi:cc.bzl", "ep_cc_library")

def _kernel_sources_impl(ctx):
    src = ctx.file.src
    args = ctx.actions.args()
    args.add("--src", src)
    args.add_all(
        [src.dirname, ctx.label.workspace_root or "."],
        before_each = "--include",
    )
    args.add_all(ctx.files._nvrtc, before_each = "--nvrtc")
    args.add("--header", ctx.outputs.header)
    args.add("--source", ctx.outputs.source)
    ctx.actions.run(
        executable = ctx.executable._compile,
        arguments = [args],
        inputs = [src] + ctx.files.hdrs + ctx.files._nvrtc,
        outputs = [ctx.outputs.header, ctx.outputs.source],
        mnemonic = "Nvrtc",
        progress_message = "Compiling kernels of %{label}",
    )

_kernel_sources = rule(
    implementation = _kernel_sources_impl,
    attrs = {
        "hdrs": attr.label_list(allow_files = True),
        "header": attr.output(mandatory = True),
        "source": attr.output(mandatory = True),
        "src": attr.label(allow_single_file = [".cu"], mandatory = True),
        "_compile": attr.label(
            default = "//third_party/cuda:nvrtc_compile",
            cfg = "exec",
            executable = True,
        ),
        # Not with cfg = "exec", for which newer Bazel resets the flag :version.
        "_nvrtc": attr.label(default = "//third_party/cuda:nvrtc"),
    },
)

def cuda_kernels(name, src, hdrs = []):
    """Compiles a CUDA source with NVRTC into a cc_library with kKernelImages.

    NVRTC has no standard library and no host code. Declare every function
    `__device__` or `__global__`, and kernels `extern "C"`, so that the driver
    finds them by name. For the header of the library see nvrtc_compile.py.

    Args:
      name: The name of the library and of its header, `<name>.h`.
      src: The source.
      hdrs: The headers that the source includes, by their path from its folder
        or from the root of the repository.
    """
    _kernel_sources(
        name = name + "_sources",
        src = src,
        hdrs = hdrs,
        header = name + ".h",
        source = name + ".cc",
        tags = ["manual"],  # built only with the library
    )
    ep_cc_library(
        name = name,
        srcs = [name + ".cc"],
        hdrs = [name + ".h"],
    )
