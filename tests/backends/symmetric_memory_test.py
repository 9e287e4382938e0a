# SPDX-License-Identifier: Apache-2.0
"""Two XLA flags put ragged-all-to-all's operands into symmetric GPU memory.

XLA's device kernel of the exchange needs operands and results in symmetric
memory. XLA chooses between its kernels at run time, so the compiled program
shows the memory, and not the kernel.
"""

from concurrent import futures
import multiprocessing
import re

import jax
from jax import lax
import jax.numpy as jnp
import pytest

from ep._src.backends.xla import device_kernels
from gpu_compiler import needs_compiler
import targets

FLAGS = " ".join(
  f"{name}={value}" for name, (value, _) in device_kernels._FLAGS.items()
)


def _memory() -> list[list[str]]:
  """Returns the memory spaces of sent rows and of received rows."""
  mesh = targets.mesh("h100x4")
  sharding = jax.sharding.NamedSharding(mesh, jax.P("ep"))

  def exchange(rows, sizes):
    sizes = sizes[0]
    starts = jnp.cumsum(sizes) - sizes
    out = jnp.zeros((256, 128), jnp.bfloat16)
    recv = lax.ragged_all_to_all(
      2 * rows, out, starts, sizes, starts, sizes, axis_name="ep"
    )
    return 2 * recv

  program = jax.shard_map(
    exchange, mesh=mesh, in_specs=jax.P("ep"), out_specs=jax.P("ep")
  )
  rows = jax.ShapeDtypeStruct((4 * 64, 128), jnp.bfloat16, sharding=sharding)
  sizes = jax.ShapeDtypeStruct((4, 4), jnp.int32, sharding=sharding)
  text = jax.jit(program).lower(rows, sizes).compile().as_text()
  types = dict(re.findall(r"(%[\w.\-]+) = (\w+\[\S*\}) ", text))
  ((received, sent),) = re.findall(
    r"(%\S+) = \S+ ragged-all-to-all\((%[\w.\-]+)", text
  )
  return [re.findall(r"S\(\d+\)", types[x]) for x in (sent, received)]


@needs_compiler
@pytest.mark.skipif(
  jax.__version_info__ < (0, 12), reason="XLA does not know the flags"
)
def test_the_flags_put_sent_rows_into_the_memory_of_received_rows(monkeypatch):
  """XLA reads its flags once, so each value needs a new process."""
  context = multiprocessing.get_context("spawn")
  found = []
  for flags in "", FLAGS:
    monkeypatch.setenv("XLA_FLAGS", flags)
    with futures.ProcessPoolExecutor(1, context) as process:
      found.append(process.submit(_memory).result())
  (sent, received), both = found
  assert sent != received
  assert both == [received, received]
