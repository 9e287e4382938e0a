# SPDX-License-Identifier: Apache-2.0
"""Places experts anew while a run goes on, which changes none of its bits."""

import jax
import numpy as np

import ep
from lm import train


class Placing:
  """Where the experts of each layer are, and their loads since they came there.

  Args:
    group: of the MoE layers; None for a model without.
    specs: of a state, as of `train.partition_specs`.
    first: where the experts are now, which is their own order.
    every: steps after which experts are placed anew; 0 for never.
  """

  def __init__(
    self,
    group: ep.EpGroup | None,
    specs: train.State,
    first: ep.Placement,
    every: int,
  ):
    self._group = group
    self._specs = specs
    self._every = every
    self._loads: list[np.ndarray] = []  # [layers, E] of each step
    self.placement = first

  def after(
    self, done: int, load: jax.Array, state: train.State
  ) -> tuple[train.State, str | None]:
    """Returns the state after step `done`, and what to tell if experts moved.

    Args:
      done: steps done.
      load: `[layers, E]` of the last one.
      state: after it.
    """
    if not self._every:
      return state, None
    self._loads.append(np.asarray(load))
    if done % self._every:
      return state, None
    loads = np.stack(self._loads, axis=1)  # [layers, steps, E]
    # Only which ranks share a node counts, and here all of them do.
    node = ep.Cluster.named("dgx_h100", 1, gpus_per_node=self._group.ep_size)
    old = self.placement
    self.placement = ep.place(loads, node, old=old)
    self._loads = []
    before, after = (self._busiest(loads, p) for p in (old, self.placement))
    return self._move(state, old, self.placement), (
      f"step {done}: experts placed anew; the busiest rank of a layer and step"
      f" has had {before:.2f} times the mean load, here {after:.2f}"
    )

  def in_order(self, state: train.State) -> train.State:
    """Returns a state with experts in their own order, as checkpoints have."""
    if not self._every:
      return state
    return self._move(state, self.placement, None)

  def _move(self, state, old, new):
    return ep.moe.move(self._group, state, self._specs, old=old, new=new)

  def _busiest(self, loads, placement):
    """Returns the mean over layers and steps."""
    loads = np.take_along_axis(loads, placement.experts[:, None], axis=2)
    ranks = loads.reshape(*loads.shape[:2], self._group.ep_size, -1).sum(axis=3)
    return float((ranks.max(axis=2) / ranks.mean(axis=2)).mean())
