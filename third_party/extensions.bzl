"""The module extension behind MODULE.bazel."""

load(":repositories.bzl", "ep_repositories")

def _ep_dependencies_impl(_mctx):
    ep_repositories()

ep_dependencies = module_extension(implementation = _ep_dependencies_impl)
