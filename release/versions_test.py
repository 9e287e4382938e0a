# SPDX-License-Identifier: Apache-2.0
"""Tests that the files agree on the versions of our dependencies.

tools/release.py compares the files with our own version.
"""

import pathlib
import re
import tomllib

_ROOT = pathlib.Path(__file__).parents[1]


def read(path: str) -> str:
  return (_ROOT / path).read_text()


def pins(path: str) -> set[str]:
  """Returns the requirements in a file."""
  return {line for line in read(path).splitlines() if "==" in line}


def version(code: str) -> str:
  """Returns the version of an NCCL_VERSION_CODE."""
  return f"{int(code) // 10000}.{int(code) // 100 % 100}.{int(code) % 100}"


def main() -> None:
  project = tomllib.loads(read("pyproject.toml"))
  # The sdist and Bazel compile against the headers of the oldest JAX that ep
  # supports. pip.bzl uses the first JAX in the lock, which is the oldest.
  _, jaxlib = project["build-system"]["requires"]
  lock = read("third_party/py/requirements_lock.txt").splitlines()
  locked = next(line for line in lock if line.startswith("jaxlib=="))
  assert locked.split(" ")[0] == jaxlib, f"{jaxlib}, but the lock has {locked}"
  jax, _ = project["project"]["dependencies"]
  assert jax == jaxlib.replace("jaxlib==", "jax>="), f"{jax}, but {jaxlib}"

  for cuda in ("12", "13"):
    template = read("release/cuda.toml").replace("@CUDA@", cuda)
    built = pins(f"third_party/cuda/requirements_cuda{cuda}.in")
    required = tomllib.loads(template)["project"]["dependencies"]
    assert "jax-ep==@VERSION@" in required
    assert "nccl-extensions==0.1.0" in {*required} & built
    # NCCL may be newer than the headers with which NCCL EP was built.
    limits = read("ep_ffi/backends/nccl/limits.h")
    oldest, newest = (
      version(re.search(rf"k{name}Nccl = (\d+);", limits)[1])
      for name in ("Oldest", "Newest")
    )
    assert f"nvidia-nccl-cu{cuda}>={oldest},<={newest}" in required
    assert f"nvidia-nccl-cu{cuda}=={oldest}" in built


if __name__ == "__main__":
  main()
