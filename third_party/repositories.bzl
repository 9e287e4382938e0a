# SPDX-License-Identifier: Apache-2.0
"""Declares the repositories of this module, for Bzlmod and WORKSPACE."""

load("//third_party/cuda:version.bzl", "cuda_version")
load(":pip.bzl", "pip_archive", "pip_packages")
load(":python.bzl", "python_toolchain")

_PY_LOCK = Label("//third_party/py:requirements_lock.txt")

# Both package lists give the layout of CUDA: include/, lib/, bin/, nvvm/.
_CUDA_PACKAGES = {
    "12": {
        "nvidia-cuda-cccl-cu12": "nvidia/cuda_cccl",
        "nvidia-cuda-nvcc-cu12": "nvidia/cuda_nvcc",  # has crt/, but no nvcc
        "nvidia-cuda-nvrtc-cu12": "nvidia/cuda_nvrtc",
        "nvidia-cuda-runtime-cu12": "nvidia/cuda_runtime",
    },
    "13": {
        "nvidia-cuda-cccl": "nvidia/cu13",
        "nvidia-cuda-crt": "nvidia/cu13",
        "nvidia-cuda-nvcc": "nvidia/cu13",
        "nvidia-cuda-nvrtc": "nvidia/cu13",
        "nvidia-cuda-runtime": "nvidia/cu13",
        "nvidia-nvvm": "nvidia/cu13",
    },
}

def ep_repositories():
    """Declares the repositories, which Bazel fetches for targets that need them."""
    python_toolchain(name = "ep_python")

    pip_packages(
        name = "ep_pypi",
        bytecode = [
            "_pytest",
            "jax",
            "jaxlib",
            "numpy",
        ],
        lock = _PY_LOCK,
    )

    # This lock leaves out the packages of @ep_pypi.
    pip_packages(
        name = "ep_examples_pypi",
        bytecode = [
            "equinox",
            "flax",
            "optax",
            "orbax",
        ],
        lock = Label("//third_party/py:requirements_examples_lock.txt"),
    )

    # The FFI headers of the oldest JAX, for any Python. A module with its own
    # JAX compiles the native library without fetching our JAX.
    pip_archive(
        name = "ep_xla_ffi",
        build_file = Label("//third_party/cc:xla_ffi.BUILD"),
        lock = _PY_LOCK,
        packages = {"jaxlib": "jaxlib/include"},
        python_version = "3.11",
    )

    # PyPI has GoogleTest in the source archive of grpcio, below BoringSSL.
    pip_archive(
        name = "ep_googletest",
        build_file = Label("//third_party/cc:googletest.BUILD"),
        build_requires = ["setuptools"],
        lock = Label("//third_party/cc:requirements_lock.txt"),
        packages = {
            "grpcio": "grpcio-1.85.1/third_party/boringssl-with-bazel/third_party/googletest/googletest",
        },
    )
    pip_archive(
        name = "ep_zig",
        build_file = Label("//third_party/cc:zig.BUILD"),
        lock = Label("//third_party/cc:requirements_lock.txt"),
        packages = {"ziglang": "ziglang"},
    )

    cuda_version(name = "ep_cuda_version")
    for version, packages in _CUDA_PACKAGES.items():
        lock = Label("//third_party/cuda:requirements_lock_cuda{}.txt".format(version))
        pip_archive(
            name = "ep_cuda" + version,
            build_file = Label("//third_party/cuda:cuda.BUILD"),
            lock = lock,
            packages = packages,
        )
        pip_archive(
            name = "ep_nccl" + version,
            build_file = Label("//third_party/cuda:nccl.BUILD"),
            lock = lock,
            packages = {
                "nccl-extensions": "nccl/ep",
                "nvidia-nccl-cu" + version: "nvidia/nccl",
            },
        )
        pip_packages(
            name = "ep_pypi_cuda" + version,
            lock = Label("//third_party/py:requirements_lock_cuda" + version + ".txt"),
        )

    # XLA's compiler for GPUs, which needs none of NVIDIA's libraries.
    pip_packages(
        name = "ep_gpu_compiler_pypi",
        lock = Label("//third_party/py:requirements_lock_cuda13.txt"),
        packages = [
            "jax-cuda13-pjrt",
            "jax-cuda13-plugin",
        ],
    )

    # XLA's compiler for TPUs.
    pip_packages(
        name = "ep_tpu_compiler_pypi",
        lock = Label("//third_party/py:requirements_lock_tpu.txt"),
        packages = ["libtpu"],
    )

    pip_packages(
        name = "ep_docs_pypi",
        lock = Label("//third_party/docs:requirements_lock.txt"),
    )
    pip_packages(
        name = "ep_tools_pypi",
        lock = Label("//third_party/tools:requirements_lock.txt"),
    )
