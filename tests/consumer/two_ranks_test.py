# SPDX-License-Identifier: Apache-2.0
"""Two ranks use ep from a workspace that depends on ep.

Dispatch and combine with one expert per token return the tokens. The runfiles
contain one JAX, from the repository that --jax_from names.
"""

import argparse
import os
import sys

from ep import launch


def run_rank() -> None:
  launch.initialize()

  import jax
  import numpy as np

  import ep

  mesh = jax.make_mesh((2,), ("ep",), (jax.sharding.AxisType.Auto,))
  rows = jax.NamedSharding(mesh, jax.P("ep"))

  def put(array):
    return jax.make_array_from_process_local_data(rows, array)

  tokens = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)
  tokens += jax.process_index()
  topk_idx = (np.arange(8, dtype=np.int32) % 4)[:, None]
  weights = np.ones((8, 1), np.float32)
  with ep.ep_bootstrap(mesh, num_experts=4, top_k=1) as group:
    handle = ep.ep_prepare(ep.EpLayerConfig(group), put(topk_idx))
    received, _ = ep.ep_dispatch(handle, put(tokens), put(weights))
    out = ep.ep_combine(handle, received)
    np.testing.assert_array_equal(out.addressable_data(0), tokens)


def check_one_jax(jax_from: str) -> None:
  """Checks that the runfiles contain one jax package, from `jax_from`."""
  # Older Bazel makes two links to each file of another repository.
  found = {
    os.path.realpath(os.path.join(folder, "jax"))
    for folder, subfolders, _ in os.walk(os.environ["TEST_SRCDIR"])
    if "jax" in subfolders
    and os.path.exists(os.path.join(folder, "jax", "__init__.py"))
  }
  assert len(found) == 1, f"not one JAX but {found}"
  assert jax_from in found.pop(), f"JAX is not from {jax_from}"


def main() -> int:
  parser = argparse.ArgumentParser()
  parser.add_argument("--jax_from", required=True)
  args = parser.parse_args()
  if launch.inside_launcher():
    run_rank()
    return 0
  check_one_jax(args.jax_from)
  return launch.launch(sys.argv, num_processes=2, devices_per_process=1)


if __name__ == "__main__":
  sys.exit(main())
