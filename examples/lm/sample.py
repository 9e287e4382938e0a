# SPDX-License-Identifier: Apache-2.0
"""Text that a model writes, byte by byte."""

from collections.abc import Sequence

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

import ep
from lm import data, model


def generate(
  params: dict,
  config: model.ModelConfig,
  layer: ep.MoE,
  prompts: Sequence[bytes],
  *,
  moe_state: ep.moe.State,
  count: int,
  temperature: float,
  seed: int,
) -> list[bytes]:
  """Returns each prompt, continued by `count` bytes; all ranks take part.

  Prompts and what they become are one scan over positions, in which a prompt's
  bytes are given and the bytes after it are drawn. Any number of prompts is
  allowed: the batch is filled up to a multiple of the ranks, and the rows that
  fill it go to no expert.

  Args:
    params: of the model.
    config: the shape of the model.
    layer: its expert layer.
    prompts: of one byte or more each.
    moe_state: see `model.apply`.
    count: bytes to write.
    temperature: 0 takes the likeliest byte; 1 draws by the model's own odds.
    seed: of the draws.
  """
  mesh = layer.group.mesh
  batch = -(-len(prompts) // mesh.size) * mesh.size
  lengths = np.zeros(batch, np.int32)
  lengths[: len(prompts)] = [len(prompt) for prompt in prompts]
  given = np.zeros((batch, lengths.max() + count), np.int32)
  for row, prompt in zip(given, prompts, strict=False):
    row[: len(prompt)] = np.frombuffer(prompt, np.uint8)

  def write(params, moe_state, given, lengths):
    def position(carry, at):
      cache, token = carry
      token = jnp.where(at < lengths, given[:, at], token)
      logits, _, cache = model.apply(
        params,
        config,
        layer,
        token[:, None],
        moe_state=moe_state,
        start=at,
        cache=cache,
        mask=(lengths > 0)[:, None],
      )
      return (cache, draw(logits[:, 0], at)), token

    def draw(logits, at):
      if temperature == 0:
        return logits.argmax(axis=-1).astype(jnp.int32)
      key = jax.random.fold_in(jax.random.key(seed), at)
      return jax.random.categorical(key, logits / temperature).astype(jnp.int32)

    cache = model.Cache.zeros(config, *given.shape)
    start = cache, given[:, 0]
    _, tokens = lax.scan(position, start, jnp.arange(given.shape[1]))
    return tokens.T

  tokens = jax.jit(write, out_shardings=NamedSharding(mesh, P()))(
    params, moe_state, data.place(given, mesh), data.place(lengths, mesh)
  )
  ends = lengths + count
  return [
    bytes(row[:end].astype(np.uint8))
    for row, end in zip(np.asarray(tokens), ends[: len(prompts)], strict=False)
  ]
