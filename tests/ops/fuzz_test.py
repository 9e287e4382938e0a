# SPDX-License-Identifier: Apache-2.0
"""Every op equals the oracle bit for bit, for random layers and routings.

    python -m pytest tests/ops/fuzz_test.py --fuzz_cases=3000 --fuzz_seed=7

A failure prints the command that repeats the failed case alone. Case i of a
seed does not depend on the other cases of the run. `ROUTINGS` cases share a
layer, because each layer needs a compiled program; each case draws another
routing and other arrays. Every second case has special values among its
numbers. XLA compiles programs of the xla backend slowly, so that backend runs
every fourth layer only.
"""

import os
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from cases import Case
from conftest import make_mesh
import ep
from groups import bootstrap, MESHES, ranks
from op_functions import everything, sizes

ROUTINGS = 50  # cases per layer

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


class Draw(NamedTuple):
  """A random group, and a layer and tokens for it."""

  mesh: str
  options: dict[str, Any]  # of the group
  dtype: jnp.dtype


def draw_layer(rng):
  mesh = str(rng.choice(list(MESHES)))
  ep_size = MESHES[mesh]["ep"]
  num_experts = int(rng.integers(1, 5 * ep_size + 1))
  local = -(-num_experts // ep_size)
  top_k = int(rng.integers(1, min(num_experts, 6) + 1))
  tokens = int(rng.integers(1, 10))
  alignment = int(rng.choice([1, 2, 3, 4, 8]))
  worst = ep_size * tokens * min(top_k, local) + local * (alignment - 1)
  segments = int(rng.integers(local, max(local, worst // alignment) + 1))
  overflow = str(rng.choice(["error", "drop"]))
  drop_by = str(rng.choice(["slot", "fair"]))
  options = dict(
    num_experts=num_experts,
    top_k=top_k,
    max_tokens_per_rank=tokens,
    alignment=alignment,
    overflow=overflow,
    hidden_dim=int(rng.integers(1, 20)),
    recv_capacity_per_rank=None if rng.random() < 0.4 else segments * alignment,
    drop_by=drop_by if overflow == "drop" else "slot",
  )
  return Draw(mesh, options, DTYPES[rng.integers(len(DTYPES))])


def draw_routing(rng, draw, ranks):
  """Draws choices `[ranks * T, K]`, with unused ones and frequent experts."""
  num_experts = draw.options["num_experts"]
  shape = ranks * draw.options["max_tokens_per_rank"], num_experts
  demand = rng.choice([0, 1, 4]) * rng.permutation(num_experts)
  idx = (rng.gumbel(size=shape) + demand).argsort(-1)[
    :, -draw.options["top_k"] :
  ]
  used = rng.random(idx.shape) < rng.choice([0, 0.3, 0.9, 1])
  return np.where(used, idx, -1).astype(np.int32)


def draw_weights(rng, draw, routing):
  """Draws weights, some equal, or None for "slot", which reads none."""
  if draw.options["drop_by"] == "slot":
    return None
  return rng.integers(-9, 9, routing.shape).astype(np.float32)


def pytest_generate_tests(metafunc):
  option = metafunc.config.getoption
  first, count = option("fuzz_first"), option("fuzz_cases")
  layers = range(first // ROUTINGS, -(-(first + count) // ROUTINGS))
  backends = [(x, "host") for x in layers]
  backends += [(x, "xla") for x in layers if x % 4 == 0]
  metafunc.parametrize("layer, backend", backends)


def test_fuzz(request, layer, backend):
  option = request.config.getoption
  seed, first = option("fuzz_seed"), option("fuzz_first")
  wanted = range(first, first + option("fuzz_cases"))
  rng = np.random.default_rng([seed, layer])
  draw = draw_layer(rng)
  # Both backends share the code of "fair", which XLA compiles slowly.
  if backend == "xla":
    options = draw.options | dict(drop_by="slot")
    draw = draw._replace(options=options)
  mesh = make_mesh(MESHES[draw.mesh])
  with bootstrap(mesh, backend=backend, **draw.options) as group:
    config = ep.EpLayerConfig(group)
    for index in range(layer * ROUTINGS, (layer + 1) * ROUTINGS):
      if index not in wanted:
        continue
      rng = np.random.default_rng([seed, layer, index])
      routing = draw_routing(rng, draw, group.num_token_ranks)
      case = Case(
        config,
        routing,
        lead=(group.max_tokens_per_rank,),
        hidden=group.hidden_dim,
        specials=index % 2 == 1,
        routing_weights=draw_weights(rng, draw, routing),
      )
      try:
        check(case, draw)
      except BaseException:
        print(f"\n{draw} on {backend}; {reproducer(seed, index)}")
        raise


def check(case, draw):
  """Checks the results of every op, or the error if rows do not fit."""
  is_lost = (case.topk_idx >= 0) & ~case.oracle.sizes().kept
  domains = ranks(case.layer) // case.layer.ep_size
  too_few = is_lost.reshape(domains, -1).any(-1)
  if draw.options["overflow"] == "drop" or not too_few.any():
    return case.check(everything, *case.inputs(draw.dtype))
  # Ranks of other domains may have finished before the error.
  for rank, error in case.errors(sizes).items():
    if error or too_few[rank // case.layer.ep_size]:
      assert f"the capacity is {case.layer.capacity};" in error


def reproducer(seed, index):
  """Returns the command that repeats this case."""
  launcher = (
    f"-m ep launch --num_processes={os.environ['JAX_NUM_PROCESSES']} "
    if "JAX_NUM_PROCESSES" in os.environ
    else ""
  )
  return (
    f"repeat it with: python {launcher}-m pytest tests/ops/fuzz_test.py"
    f" --fuzz_seed={seed} --fuzz_first={index} --fuzz_cases=1"
  )
