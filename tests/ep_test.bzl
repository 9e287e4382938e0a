"""The macro that runs one pytest file in several worlds."""

load("@rules_python//python:defs.bzl", "py_test")

# Bazel's limits for a test of each size, in seconds.
_LIMITS = {"small": 60, "medium": 300, "large": 900}

def ep_test(
        name,
        srcs = None,
        deps = [],
        worlds = ["1x4", "4x1"],
        platform = "cpu",
        size = "medium",
        tags = [],
        data = [],
        env = {},
        **kwargs):
    """One py_test per world, named <name>_<world>_<platform>, and a suite.

    The suite, <name>, is all of them.

    Args:
      name: of the suite, and by default of the file: <name>.py.
      srcs: the test file, a list of one.
      deps: what it imports besides //tests:harness.
      worlds: "4x1" stands for 4 processes with 1 device each. A test of plain
        Python, or of one device, names one world.
      platform: "cpu". A GPU variant is a second call with another platform.
      size: Bazel's; most of a test's time is XLA's compiler's. The ranks are
        ended, their stacks in their logs, somewhat before Bazel would end the
        test.
      tags: added to ours, which tell Bazel how many processes run.
      data: what it finds at run time besides its file.
      env: variables of its ranks besides ours.
      **kwargs: passed on to py_test.
    """
    srcs = srcs or [name + ".py"]
    tests = []
    for world in worlds:
        test = "{}_{}_{}".format(name, world, platform)
        tests.append(test)
        py_test(
            name = test,
            size = size,
            srcs = srcs + ["//tests:run_ranks.py"],
            main = "//tests:run_ranks.py",
            args = [
                "--world=" + world,
                "--timeout={}".format(_LIMITS[size] * 9 // 10),
                "$(rootpath {})".format(srcs[0]),
            ],
            data = srcs + data,
            env = env | {"JAX_PLATFORMS": platform},
            tags = tags + ["cpu:" + world.split("x")[0]],
            deps = deps + ["//tests:harness"],
            **kwargs
        )
    native.test_suite(name = name, tests = tests)
