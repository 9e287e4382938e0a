# SPDX-License-Identifier: Apache-2.0
"""The module extension of MODULE.bazel."""

load(":repositories.bzl", "ep_repositories")

def _ep_dependencies_impl(mctx):
    ep_repositories()

    # The result is equal in every module, so no MODULE.bazel.lock records it.
    return mctx.extension_metadata(reproducible = True)

ep_dependencies = module_extension(implementation = _ep_dependencies_impl)
