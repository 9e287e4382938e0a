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
  import jax.numpy as jnp
  import numpy as np

  import ep

  mesh = jax.make_mesh((2,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
  sharded = jax.NamedSharding(mesh, jax.P("ep"))

  def place(array):
    return jax.make_array_from_callback(
      array.shape, sharded, lambda index: array[index]
    )

  tokens = np.arange(2 * 8 * 16, dtype=np.float32).reshape(16, 16)
  topk_idx = (np.arange(16, dtype=np.int32) % 4)[:, None]
  weights = np.ones((16, 1), np.float32)

  group = ep.ep_bootstrap(
    mesh,
    num_experts=4,
    max_tokens_per_rank=8,
    hidden_dim=16,
    top_k=1,
    max_token_dtype=jnp.float32,
  )
  with group:
    layer = ep.EpLayerConfig(group, top_k=1)

    @jax.jit
    def identity(topk_idx, tokens, weights):
      handle = ep.ep_prepare(layer, topk_idx)
      recv_tokens, _ = ep.ep_dispatch(handle, tokens, weights)
      return ep.ep_combine(handle, recv_tokens)

    out = identity(place(topk_idx), place(tokens), place(weights))
    for shard in out.addressable_shards:
      np.testing.assert_array_equal(shard.data, tokens[shard.index])


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
