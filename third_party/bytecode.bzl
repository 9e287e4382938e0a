# SPDX-License-Identifier: Apache-2.0
"""Compiles Python modules to bytecode beside their sources."""

load("@ep_python//:version.bzl", "PYTHON")

_COMPILER = "//third_party:compile_bytecode"

def bytecode(name, srcs, visibility):
    """Compiles modules to the bytecode files that Python expects beside them.

    A process cannot write to its runfiles, so without these files each process
    compiles the modules that it imports.

    Args:
      name: The name of the target.
      srcs: The modules.
      visibility: The packages that may depend on it.
    """
    outs = []
    for src in srcs:
        folder, slash, module = src.rpartition("/")
        outs.append("{}{}__pycache__/{}.cpython-{}.pyc".format(
            folder,
            slash,
            module.removesuffix(".py"),
            PYTHON.replace(".", ""),
        ))
    native.genrule(
        name = name,
        srcs = srcs,
        outs = outs,
        cmd = "$(execpath {}) $(SRCS) $(OUTS)".format(_COMPILER),
        tools = [_COMPILER],
        visibility = visibility,
    )
