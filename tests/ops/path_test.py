# SPDX-License-Identifier: Apache-2.0
"""Counts the functions of ep that a first call passes, with empty caches.

A reader who follows a call must read these functions. Whoever adds one raises a
number here, and says why. On failure the test prints all of them.
"""

import collections
import contextlib
import gc
import pathlib
import sys

import jax
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from conftest import make_mesh
import ep
from groups import bootstrap, E, GPU, H, K, T

pytestmark = [
  pytest.mark.skipif(
    GPU or jax.process_count() > 1, reason="one process with CPUs suffices"
  ),
  pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="the numbers are of Python 3.11"
  ),
]

ROOT = pathlib.Path(ep.__file__).parent


class Path:
  """The functions of ep that a block calls, without lambdas and generators."""

  def __init__(self):
    self.calls = collections.Counter()

  def see(self, frame, event, arg):
    del arg
    code = frame.f_code
    is_ours = code.co_filename.startswith(f"{ROOT}/")
    if event == "call" and is_ours and not code.co_name.startswith("<"):
      self.calls[code] += 1

  def count(self, name):
    return sum(n for code, n in self.calls.items() if code.co_name == name)

  def check(self, functions, files):
    """Fails if there are more functions or files."""
    of_file = collections.defaultdict(list)
    for code in self.calls:
      file = str(pathlib.Path(code.co_filename).relative_to(ROOT))
      of_file[file].append(getattr(code, "co_qualname", code.co_name))
    found = len(self.calls), len(of_file)
    lines = [f"{f}: {', '.join(of_file[f])}" for f in sorted(of_file)]
    assert found[0] <= functions and found[1] <= files, "\n".join(
      [f"{found[0]} functions in {found[1]} files", *lines]
    )


@contextlib.contextmanager
def path():
  found = Path()
  gc.collect()  # otherwise the block may end the groups of earlier tests
  sys.setprofile(found.see)
  try:
    yield found
  finally:
    sys.setprofile(None)


@pytest.fixture(name="group", params=["host", "xla"])
def group_of_four_ranks(request):
  with bootstrap(make_mesh({"dp": 1, "ep": 4}), backend=request.param) as group:
    yield group


def put(group, array):
  spec = PartitionSpec(group.token_axes)
  return jax.device_put(array, jax.NamedSharding(group.mesh, spec))


# Functions and files. Most functions of "xla" compute the exchange itself,
# which the native library does for "host".
DISPATCH = {"host": (31, 8), "xla": (46, 10)}
LAYER = {"host": (109, 23), "xla": (132, 26)}


def test_an_eager_dispatch(group):
  tokens, ids = np.ones((4 * T, H), np.float32), np.arange(4 * T * K)
  ids = put(group, (ids % E).astype(np.int32).reshape(-1, K))
  weights = put(group, np.ones(ids.shape, np.float32))
  handle = ep.ep_prepare(ep.EpLayerConfig(group), ids)
  tokens = put(group, tokens)
  jax.clear_caches()
  with path() as first:
    ep.ep_dispatch(handle, tokens, weights)
  assert first.count("ep_dispatch") == 1
  assert first.count("capacity_for") == 0
  first.check(*DISPATCH[group.backend])
  with path() as second:
    out = ep.ep_dispatch(handle, tokens, weights)
  second.check(15, 6)
  jax.block_until_ready(out)


def test_a_layer_under_jit(group):
  layer = ep.MoE(ep.MoEConfig(H, 8, num_experts=E, top_k=K), group)
  params = layer.init(jax.random.key(0))
  tokens = put(group, np.ones((4 * T, H), np.float32))
  jax.clear_caches()
  with path() as found:
    out = jax.jit(lambda params, x: layer(params, x))(params, tokens)
  jax.block_until_ready(out)
  assert 1 <= found.count("check") <= 25
  assert found.count("capacity_for") <= 2
  found.check(*LAYER[group.backend])
