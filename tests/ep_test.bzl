# SPDX-License-Identifier: Apache-2.0
"""Defines the macro that runs pytest files in several process layouts."""

load("@rules_python//python:defs.bzl", "py_test")

# Different programs of one model give the same bits with one of the two flags
# of quick_compiler.py, but not with both flags; see docs/howto/train.md.
QUICK_AND_ALIKE = {
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
}

# Bazel's limits for a test of each size, in seconds.
_LIMITS = {"small": 60, "medium": 300, "large": 900}

# platform: JAX's name of the platform. backend: EP_TEST_BACKEND, unless it is
# the platform's default. tags: the test tags that JAX's own repository uses.
_VARIANTS = {
    "cpu": struct(platform = "cpu", backend = {}, deps = [], tags = []),
    "gpu": struct(
        platform = "cuda",
        backend = {},
        deps = ["//third_party/py:jax_gpu"],
        tags = ["gpu", "multiaccelerator", "requires-gpu-nvidia"],
    ),
    "gpu_compiler": struct(
        platform = "cpu",
        backend = {},
        deps = ["@ep_gpu_compiler_pypi//:jax_cuda13_plugin"],
        tags = ["manual"],
    ),
    "tpu_compiler": struct(
        platform = "cpu",
        backend = {},
        deps = ["@ep_tpu_compiler_pypi//:libtpu"],
        tags = ["manual"],
    ),
    "xla": struct(
        platform = "cpu",
        backend = {"EP_TEST_BACKEND": "xla"},
        deps = [],
        tags = [],
    ),
}

def _cores(world):
    """Returns the cores to reserve; half of the processes wait at any time."""
    processes = int(world.split("x")[0])
    return (processes + 1) // 2

def _on_cpu(worlds, xla):
    """Returns (layout, variant) of each CPU test."""
    return [(world, "cpu") for world in worlds] + [(world, "xla") for world in xla]

def _on_gpu(worlds, gpu):
    """Returns (layout, variant) of the GPU test, with one GPU per rank."""
    if gpu == None:
        gpu = any([not world.startswith("1x") for world in worlds])
    return [("4x1", "gpu")] if gpu else []

def ep_test(
        name,
        srcs = None,
        worlds = ["1x4", "2x2"],
        gpu = None,
        xla = [],
        gpu_compiler = [],
        tpu_compiler = [],
        first_cases = True,
        smoke = [],
        quick_compiler = True,
        shards = {},
        size = "medium",
        deps = [],
        data = [],
        env = {},
        **kwargs):
    """Defines a py_test per process layout and platform.

    The tests are named <name>_<layout>_<platform>. The suite <name> has all CPU
    tests. The tags of a test include <layout>_<platform>, for filters. Only
    --config=gpu runs GPU tests; see docs/gpu.md. <name>_<layout>_xla
    runs on the CPU with backend="xla", and <name>_<layout>_gpu_compiler and
    <name>_<layout>_tpu_compiler compile for GPUs and TPUs.

    Args:
      name: of the suite.
      srcs: test files that each process runs one after another; default: <name>.py.
        Starting a process takes longer than running many files.
      worlds: process layouts. "2x2" stands for 2 processes with 2 devices each:
        ranks exchange rows within a process and between processes. Tests of
        interprocess behavior name "4x1", which takes twice as long because each
        process compiles all programs. A test of plain Python or of one device
        names one layout.
      gpu: whether the test runs on GPUs, as 4x1; default: whether one of the
        layouts has several processes.
      xla: the layouts that also test backend="xla", which compiles slowly.
      gpu_compiler: the layouts that run with JAX's CUDA plugin, without a GPU. The
        plugin takes 400 MB, so these tests are manual: CI names them.
      tpu_compiler: the same for libtpu, which takes 700 MB and is only for x86-64.
      first_cases: whether 2x2 runs each test function only with its first
        parameters. 2x2 shows the effect of a second process; 1x4 shows the effect
        of shapes and options in half the time.
      smoke: the variants, as "4x1_cpu", that //tests:smoke runs.
      quick_compiler: whether XLA:CPU skips optimizations in layouts of one process,
        because the results do not depend on them. With several processes it
        always skips them; see conftest.py.
      shards: the number of Bazel's shards of a variant, as {"1x4_cpu": 3}. Tests
        with the same parameters are in one shard; see conftest.py.
      size: Bazel's size. XLA's compiler takes most of a test's time. The launcher
        terminates the ranks before Bazel's limit and logs their stacks.
      deps: dependencies of the files besides //tests:harness.
      data: files that the tests read besides themselves.
      env: further variables of the ranks.
      **kwargs: passed on to py_test.
    """
    srcs = srcs or [name + ".py"]
    on_cpu = _on_cpu(worlds, xla)
    compiled = [(world, "gpu_compiler") for world in gpu_compiler]
    compiled += [(world, "tpu_compiler") for world in tpu_compiler]
    for world, variant in on_cpu + compiled + _on_gpu(worlds, gpu):
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
            shard_count = shards.get(suffix),
            tags = on.tags + [suffix, "cpu:{}".format(_cores(world))] +
                   (["smoke"] if suffix in smoke else []),
            deps = deps + on.deps + ["//tests:harness"],
            **kwargs
        )
    if on_cpu:  # A suite of no tests would have all tests of the package.
        native.test_suite(
            name = name,
            tests = [
                "{}_{}_{}".format(name, world, variant)
                for world, variant in on_cpu
            ],
        )
