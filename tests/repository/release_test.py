# SPDX-License-Identifier: Apache-2.0
"""The files of a release agree with each other."""

import pathlib
import re
import tomllib

import pytest

from docs.site import links

_ROOT = pathlib.Path(__file__).absolute().parents[2]

# The files that contain the version, and the pattern of the version's line.
_VERSIONS = {
  "MODULE.bazel": r'^module\(\n    name = "jax_ep",\n    version = "(.*)",$',
  "ep/__init__.py": r'^__version__ = "(.*?)"',
}


def _read(path: str) -> str:
  return (_ROOT / path).read_text()


def test_the_files_have_one_version():
  found = {
    re.search(pattern, _read(file), re.M)[1]
    for file, pattern in _VERSIONS.items()
  }
  assert len(found) == 1


def test_the_sources_compile_against_the_oldest_jax():
  """pip.bzl uses the first JAX in the lock, which is the oldest."""
  project = tomllib.loads(_read("pyproject.toml"))
  _, jaxlib = project["build-system"]["requires"]
  lock = _read("third_party/py/requirements_lock.txt").splitlines()
  locked = next(line for line in lock if line.startswith("jaxlib=="))
  assert locked.split(" ")[0] == jaxlib
  jax, _ = project["project"]["dependencies"]
  assert jax == jaxlib.replace("jaxlib==", "jax>=")


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_the_wheel_requires_the_libraries_it_was_built_with(cuda):
  """NCCL may be newer than the headers with which NCCL EP was built."""
  template = _read("release/cuda.toml").replace("@CUDA@", cuda)
  built = _read(f"third_party/cuda/requirements_cuda{cuda}.in").splitlines()
  required = tomllib.loads(template)["project"]["dependencies"]
  assert "jax-ep==@VERSION@" in required
  assert "nccl-extensions==0.1.0" in {*required} & {*built}
  limits = _read("ep_ffi/backends/nccl/limits.h")
  oldest, newest = (
    f"{code // 10000}.{code // 100 % 100}.{code % 100}"
    for name in ("Oldest", "Newest")
    for code in [int(re.search(rf"k{name}Nccl = (\d+);", limits)[1])]
  )
  assert f"nvidia-nccl-cu{cuda}>={oldest},<={newest}" in required
  assert f"nvidia-nccl-cu{cuda}=={oldest}" in built


def test_the_page_of_an_index_links_to_the_sources():
  """Links to files become absolute links or plain text; code stays."""
  readme = (_ROOT / "README.md").read_text()
  url = "https://example.com/ep/blob/v1"
  linked = links.make_absolute(readme, "README.md", url)
  assert (
    "![Tokens" in linked
    and f"({url}/docs/images/layout.svg?raw=true)" in linked
  )
  assert f"[Tutorial]({url}/docs/tutorial.md)" in linked
  assert f"[not run there]({url}/README.md#status)" in linked
  assert (
    linked.replace(f"{url}/", "")
    .replace("?raw=true", "")
    .replace("(README.md#", "(#")
    == readme
  )
  text = links.make_absolute(readme, "README.md", "")
  assert "\nTutorial · Which backend" in text and "layout.svg" not in text
  relative = re.compile(r"\]\((?!https:)")
  assert relative.search(readme)
  assert not relative.search(linked) and not relative.search(text)
