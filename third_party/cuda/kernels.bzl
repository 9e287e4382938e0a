# SPDX-License-Identifier: Apache-2.0
"""CUDA kernels, compiled ahead of time and embedded in a cc_library."""

load("@rules_cc//cc:cc_library.bzl", "cc_library")
load("@rules_cc//cc/common:cc_info.bzl", "CcInfo")
load("//ep_ffi:copts.bzl", "EP_COPTS")

def _kernel_sources_impl(ctx):
    src = ctx.file.src
    contexts = [dep[CcInfo].compilation_context for dep in ctx.attr.deps]

    args = ctx.actions.args()
    args.add("--src", src)
    args.add_all(ctx.attr.archs, before_each = "--arch")
    args.add_all(
        depset(
            [src.dirname, ctx.label.workspace_root or "."],
            transitive = [
                folders
                for context in contexts
                for folders in [
                    context.includes,
                    context.quote_includes,
                    context.system_includes,
                ]
            ],
        ),
        before_each = "--include",
    )
    args.add_all(ctx.files._nvrtc, before_each = "--nvrtc")
    args.add("--namespace", ctx.attr.namespace)
    args.add("--symbol", ctx.attr.symbol)
    args.add("--header", ctx.outputs.header)
    args.add("--source", ctx.outputs.source)
    ctx.actions.run(
        executable = ctx.executable._compile,
        arguments = [args],
        inputs = depset(
            [src] + ctx.files.hdrs + ctx.files._nvrtc,
            transitive = [context.headers for context in contexts],
        ),
        outputs = [ctx.outputs.header, ctx.outputs.source],
        mnemonic = "Nvrtc",
        progress_message = "Compiling kernels of %{label}",
    )

_kernel_sources = rule(
    implementation = _kernel_sources_impl,
    attrs = {
        "archs": attr.string_list(mandatory = True),
        "deps": attr.label_list(providers = [CcInfo]),
        "hdrs": attr.label_list(allow_files = True),
        "header": attr.output(mandatory = True),
        "namespace": attr.string(mandatory = True),
        "source": attr.output(mandatory = True),
        "src": attr.label(allow_single_file = [".cu"], mandatory = True),
        "symbol": attr.string(mandatory = True),
        "_compile": attr.label(
            default = "//third_party/cuda:nvrtc_compile",
            cfg = "exec",
            executable = True,
        ),
        # This has no cfg = "exec", in which newer Bazel resets :version.
        "_nvrtc": attr.label(default = "//third_party/cuda:nvrtc"),
    },
)

def cuda_kernels(
        name,
        src,
        hdrs = [],
        deps = [],
        archs = ["sm_90", "sm_100", "compute_90"],
        namespace = "ep::nccl",
        **kwargs):
    """Compiles a CUDA source for each architecture, into one cc_library.

    The library has a header, `<name>.h`. For the name foo_images it declares

        struct KernelImage {
          int arch;
          const unsigned char* data;
          std::size_t size;
        };
        extern const KernelImage kFooImages[3];

    NVRTC compiles the source. It has no standard library, and no host: every
    function must be declared `__device__` or `__global__`. Declare kernels
    `extern "C"`, so that they are found by name.

    Args:
      name: of the library and its header.
      src: the source.
      hdrs: headers that it includes; it finds those in its own folder, and any
        by the path from the root of its repository.
      deps: cc_library targets of further headers, such as
        //third_party/cuda:cuda_headers for cuda_bf16.h.
      archs: one image for each, in this order: a cubin for an architecture such
        as sm_90 (`arch` is 90), PTX for one such as compute_90 (`arch` is 0).
      namespace: of what the header declares.
      **kwargs: passed on to cc_library.
    """
    symbol = "k" + "".join([word.title() for word in name.split("_")])
    _kernel_sources(
        name = name + "_sources",
        src = src,
        hdrs = hdrs,
        archs = archs,
        header = name + ".h",
        namespace = namespace,
        source = name + ".cc",
        symbol = symbol,
        tags = ["manual"],  # built with the library, or not at all
        deps = deps,
    )
    cc_library(
        name = name,
        srcs = [name + ".cc"],
        hdrs = [name + ".h"],
        copts = EP_COPTS,
        linkstatic = True,  # EP_COPTS hide the array from other libraries
        **kwargs
    )
