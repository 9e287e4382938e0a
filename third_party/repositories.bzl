"""Every repository this module brings, for Bzlmod and WORKSPACE alike."""

load(":npm.bzl", "npm_archive")
load(":pip.bzl", "pip_archive", "pip_packages")
load(":python.bzl", "python_toolchain")

_PY_LOCK = "//third_party/py:requirements_lock_{python}.txt"

def ep_repositories():
    """Declares the repositories; one is fetched when a target needs it."""
    python_toolchain(name = "ep_python")

    pip_packages(
        name = "ep_pypi",
        lock = _PY_LOCK,
    )

    # Not a part of @ep_pypi, so that a module with a JAX of its own need not
    # install ours to compile the native library.
    pip_archive(
        name = "ep_xla_ffi",
        build_file = Label("//third_party/cc:xla_ffi.BUILD"),
        lock = _PY_LOCK,
        package = "jaxlib",
        strip_prefix = "jaxlib/include",
    )

    # mypy's source archive is where PyPI has GoogleTest.
    pip_archive(
        name = "ep_googletest",
        build_file = Label("//third_party/cc:googletest.BUILD"),
        build_requires = ["setuptools"],
        lock = "//third_party/cc:requirements_lock.txt",
        package = "mypy",
        strip_prefix = "mypy-1.13.0/mypyc/external/googletest",
    )

    pip_packages(
        name = "ep_tools_pypi",
        lock = "//third_party/tools:requirements_lock.txt",
    )
    npm_archive(
        name = "ep_buildifier",
        build_file = Label("//third_party/tools:buildifier.BUILD"),
        package = "@bazel/buildifier@8.2.1",
        sha256 = "b96ea9b13003036c801f52bee6f9b0314738f8432e5cb9d814c89f59292604ee",
    )
