# SPDX-License-Identifier: Apache-2.0
"""Makes @their_pip for a test, as pip.parse of rules_python would.

The repository has one package per Python package. It shares no code with the
repository rules of jax_ep.
"""

_PACKAGES = ["absl-py", "jax==0.10.2", "jaxlib==0.10.2", "numpy"]

_BUILD = """\
load("@rules_python//python:defs.bzl", "py_library")

py_library(
    name = "{name}",
    visibility = ["//visibility:public"],
    deps = ["//:site"],
)
"""

_ROOT_BUILD = """\
load("@rules_python//python:defs.bzl", "py_library")

py_library(
    name = "site",
    data = glob(["site/*"], exclude_directories = 0),
    imports = ["site"],
    visibility = ["//:__subpackages__"],
)
"""

def _their_pip_impl(rctx):
    python = json.decode(rctx.read(Label("@ep_python//:python.json")))
    result = rctx.execute(
        [python["path"], "-m", "pip", "install", "--target=site", "--no-compile"] +
        _PACKAGES,
        environment = {"PIP_ROOT_USER_ACTION": "ignore"},
    )
    if result.return_code:
        fail(result.stderr)
    rctx.file("BUILD.bazel", _ROOT_BUILD)
    for name in ["jax", "numpy"]:
        rctx.file(name + "/BUILD.bazel", _BUILD.format(name = name))

their_pip = repository_rule(implementation = _their_pip_impl)
