"""How a library that XLA's FFI loads is linked."""

load("@rules_cc//cc:cc_binary.bzl", "cc_binary")
load(":copts.bzl", "EP_COPTS")

def ep_library(name, deps):
    """The FFI handlers and a backend in one shared library.

    It serves every Python version: it is loaded with ctypes and knows nothing
    of Python.

    Args:
      name: of the file, libep_ffi_<platform>.so.
      deps: the platform's handlers and backends.
    """
    cc_binary(
        name = name,
        additional_linker_inputs = ["exports.lds"],
        copts = EP_COPTS,
        linkopts = [
            "-Wl,--version-script=$(location exports.lds)",
            "-Wl,--no-undefined",
            "-pthread",
        ],
        linkshared = True,
        visibility = ["//visibility:public"],
        deps = deps,
    )
