# SPDX-License-Identifier: Apache-2.0
"""Reads the version of CUDA from the environment."""

def _cuda_version_impl(rctx):
    wanted = rctx.getenv("HERMETIC_CUDA_VERSION", "")
    major = wanted.split(".")[0] or "none"
    if major not in ["none", "12", "13"]:
        fail("HERMETIC_CUDA_VERSION is {}, but jax_ep builds with CUDA 12 or 13. Set it to one of these, or unset it.".format(wanted))
    rctx.file("BUILD.bazel")
    rctx.file("version.bzl", "CUDA_MAJOR = \"{}\"\n".format(major))

cuda_version = repository_rule(
    implementation = _cuda_version_impl,
    doc = """\
Defines CUDA_MAJOR in `:version.bzl`: the major version of HERMETIC_CUDA_VERSION.

The `--config=cuda` of XLA sets this variable. The locks here pin one release per
major version, so only the major version matters.""",
)
