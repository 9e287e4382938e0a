# SPDX-License-Identifier: Apache-2.0
"""The macro that runs pytest files in several worlds."""

load("@rules_python//python:defs.bzl", "py_test")

# With one of the flags of quick_compiler.py, different programs of one model
# still round alike, while with both they do not; see docs/training.md.
QUICK_AND_ALIKE = {
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
}

# Bazel's limits for a test of each size, in seconds.
_LIMITS = {"small": 60, "medium": 300, "large": 900}

# A variant has JAX's name of the platform, a variable that names the backend if
# it is not the platform's own, dependencies, and JAX's tags.
_VARIANTS = {
    "cpu": struct(platform = "cpu", backend = {}, deps = [], tags = []),
    "gpu": struct(
        platform = "cuda",
        backend = {},
        deps = ["//third_party/py:jax_gpu"],
        tags = ["gpu", "multiaccelerator", "requires-gpu-nvidia"],
    ),
    "xla": struct(
        platform = "cpu",
        backend = {"EP_TEST_BACKEND": "xla"},
        deps = [],
        tags = [],
    ),
}

def _cores(world):
    """Returns how many cores the test asks for; processes wait for each other."""
    processes = int(world.split("x")[0])
    return (processes + 1) // 2

def _on_cpu(worlds, xla):
    """Returns (world, variant) of each test for the CPU."""
    return [(world, "cpu") for world in worlds] + [(world, "xla") for world in xla]

def _on_gpu(worlds, gpu):
    """Returns (world, variant) of the test for GPUs, one of which is a rank's."""
    if gpu == None:
        gpu = any([not world.startswith("1x") for world in worlds])
    return [("4x1", "gpu")] if gpu else []

def ep_test(
        name,
        srcs = None,
        worlds = ["1x4", "2x2"],
        gpu = None,
        xla = [],
        first_cases = True,
        smoke = [],
        quick_compiler = False,
        size = "medium",
        deps = [],
        data = [],
        env = {},
        **kwargs):
    """Defines a py_test per world and platform, <name>_<world>_<platform>.

    A suite, <name>, is all of those for the CPU. Those for GPUs are left out of
    test runs without --config=gpu; see docs/gpu.md. Those named <name>_<world>_xla
    are on the CPU, too, with backend="xla" in place of the platform's.

    Args:
      name: of the suite.
      srcs: the files, which each process runs one after another: <name>.py unless
        others are named. A process takes longer to start than many files run.
      worlds: "2x2" stands for 2 processes with 2 devices each, in which ranks
        exchange rows both within a process and between two. Tests of what
        processes do with each other name "4x1"; each process compiles all
        programs, so that takes twice as long. A test of plain Python, or of one
        device, names one world.
      gpu: whether the test runs on GPUs, as 4x1: by default, if one of its
        worlds has several processes.
      xla: the worlds in which backend="xla" is tested as well; XLA takes long
        to compile it.
      first_cases: whether each test function runs only with its first parameters
        in the world 2x2. It shows what a second process changes. How shapes and
        options change results is seen in 1x4, at half the time.
      smoke: the variants, as "4x1_cpu", that //tests:smoke runs.
      quick_compiler: whether XLA:CPU may leave code as it is in worlds of one
        process. In those of many processes it always does; see conftest.py.
      size: Bazel's size. XLA's compiler takes most of a test's time. The
        launcher ends the ranks somewhat before Bazel would end the test, and
        their logs then have their stacks.
      deps: dependencies of the files besides //tests:harness.
      data: files that the tests read besides themselves.
      env: further variables of the ranks.
      **kwargs: passed on to py_test.
    """
    srcs = srcs or [name + ".py"]
    on_cpu = _on_cpu(worlds, xla)
    for world, variant in on_cpu + _on_gpu(worlds, gpu):
        on = _VARIANTS[variant]
        suffix = "{}_{}".format(world, variant)
        py_test(
            name = "{}_{}".format(name, suffix),
            size = size,
            srcs = srcs + ["//tests:run_ranks.py"],
            main = "//tests:run_ranks.py",
            args = [
                       "--world=" + world,
                       "--timeout={}".format(_LIMITS[size] * 9 // 10),
                   ] + (["--first_cases"] if first_cases and world == "2x2" else []) +
                   ["$(rootpath {})".format(src) for src in srcs],
            data = data + srcs,
            env = env | on.backend | {
                "EP_TEST_QUICK_COMPILER": "1" if quick_compiler else "0",
                "JAX_PLATFORMS": on.platform,
            },
            tags = on.tags + ["cpu:{}".format(_cores(world))] +
                   (["smoke"] if suffix in smoke else []),
            deps = deps + on.deps + ["//tests:harness"],
            **kwargs
        )
    native.test_suite(
        name = name,
        tests = [
            "{}_{}_{}".format(name, world, variant)
            for world, variant in on_cpu
        ],
    )
