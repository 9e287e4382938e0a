# SPDX-License-Identifier: Apache-2.0
"""Finds the Python of the machine.

Repository rules run pip with this Python, and a toolchain runs tests with it.
So pip picks wheels for the interpreter that imports them.
"""

def _watch_path(rctx, name):
    """Makes Bazel fetch the repository again when PATH has another program.

    Bazel does not notice when a shim, such as pyenv's, picks another interpreter,
    because the file of the shim stays the same.

    Args:
      rctx: the repository context.
      name: the name of the program.
    """
    for folder in rctx.getenv("PATH", "").split(":"):
        if folder.startswith("/"):
            program = rctx.path(folder).get_child(name)
            rctx.watch(program)
            if program.exists:
                return

def _find_python(rctx):
    """Returns the interpreter's absolute path, past shims, and its version."""
    wanted = rctx.getenv("HERMETIC_PYTHON_VERSION", "")
    name = "python" + (wanted or "3")
    _watch_path(rctx, name)
    cure = (" Put {} on PATH, or name a version that is there: " +
            "--repo_env=HERMETIC_PYTHON_VERSION=3.11.").format(name)
    program = rctx.which(name)
    if not program:
        fail("There is no {} on PATH.".format(name) + cure)

    # Use sys.executable, because a shim picks its interpreter by the current
    # folder and the environment, and both differ when tests run.
    result = rctx.execute([
        program,
        "-c",
        "import sys; print(sys.executable, '%d.%d' % sys.version_info[:2])",
    ])
    if result.return_code:
        fail("{} does not run: {}".format(program, result.stderr) + cure)
    path, version = result.stdout.strip().split(" ")
    if wanted and version != wanted:
        fail("{} is Python {}, not {}.".format(program, version, wanted) + cure)
    return struct(path = path, version = version)

# This file of newer rules_python defines the toolchains for build steps.
_EXEC_TOOLS = Label("@rules_python//python:py_exec_tools_toolchain.bzl")

_BUILD = """\
load("@rules_python//python:py_runtime.bzl", "py_runtime")
load("@rules_python//python:py_runtime_pair.bzl", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

py_runtime(
    name = "python3",
    interpreter_path = "{path}",
    python_version = "PY3",
    stub_shebang = "#!{path}",
)

py_runtime_pair(
    name = "pair",
    py3_runtime = ":python3",
)

toolchain(
    name = "toolchain",
    toolchain = ":pair",
    toolchain_type = "@rules_python//python:toolchain_type",
)
"""

# Without this toolchain, newer rules_python downloads another Python for build
# steps, even if there are no such steps.
_EXEC_TOOLS_BUILD = """
load("@rules_python//python:py_exec_tools_toolchain.bzl", "py_exec_tools_toolchain")

py_exec_tools_toolchain(name = "exec_tools")

toolchain(
    name = "exec_tools_toolchain",
    toolchain = ":exec_tools",
    toolchain_type = "@rules_python//python:exec_tools_toolchain_type",
)
"""

def _python_toolchain_impl(rctx):
    python = _find_python(rctx)
    rctx.watch(python.path)  # fetch everything again after an upgrade
    build = _BUILD.format(path = python.path)
    if rctx.path(_EXEC_TOOLS).exists:
        build += _EXEC_TOOLS_BUILD
    rctx.file("BUILD.bazel", build)
    rctx.file("python.json", json.encode(python))
    rctx.file("version.bzl", "PYTHON = " + repr(python.version))

python_toolchain = repository_rule(
    implementation = _python_toolchain_impl,
    doc = """\
Toolchains, `:all`, that run the machine's Python.

`:toolchain` is for programs and tests. The other toolchain is for build steps of
newer rules_python.""",
)

def host_python(rctx):
    """Returns the Python that @ep_python found, for another repository rule.

    Args:
      rctx: the repository context.

    Returns:
      A struct: `path`, the interpreter's absolute path, and `version`, such as
      "3.11".
    """
    return struct(**json.decode(rctx.read(Label("@ep_python//:python.json"))))
