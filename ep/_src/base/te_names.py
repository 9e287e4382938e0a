# SPDX-License-Identifier: Apache-2.0
"""Explains arguments of TransformerEngine's JAX ops that ep does not have.

TransformerEngine's functions have the names of ours and other arguments: see
"Coming from TransformerEngine" in docs/sharp_bits.md.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import inspect
from typing import Any, TypeVar

_Public = TypeVar("_Public", bound=Callable[..., Any])

# For each argument of TransformerEngine alone, the table has ep's counterpart.
_OURS = {
  "world_size": "`mesh`, which says how many ranks there are",
  "rank": "`mesh`, which says which devices are this process's",
  "ep_size": "`axis_name`, the mesh axis whose size it is",
  "drop_on_overflow": '`overflow`, which is "error", "drop" or "chunk"',
  "dispatch_output_per_expert_alignment": "`alignment`",
  "cfg": "`layer`, an EpLayerConfig, in ep_prepare, and `handle` elsewhere",
  "handle_mem": "`handle`, all that ep_prepare returned",
  "topk_idx": "`handle`, which ep_prepare made of the ids",
  "token_counts": "`handle`, which holds them",
  "recv_capacity_per_rank": "the argument of that name of EpLayerConfig",
  "num_local_tokens": "`handle`, which knows them",
  "out_sharding": "nothing: the result is sharded as the tokens were",
}


def explain(public: _Public) -> _Public:
  """Makes a public function, or a class, explain TransformerEngine's arguments.

  It raises a `TypeError` for a keyword that is in the table and is not among
  its parameters.
  """
  if inspect.isclass(public):
    public.__init__ = _explained(public.__name__, public.__init__)
    return public
  return _explained(public.__name__, public)


def _explained(name: str, function: Callable[..., Any]) -> Any:
  theirs = _OURS.keys() - inspect.signature(function).parameters.keys()

  @functools.wraps(function)
  def call(*args, **kwargs):
    for keyword in kwargs.keys() & theirs:
      raise TypeError(
        f"{name}: {keyword} is an argument of TransformerEngine's; ep has"
        f" {_OURS[keyword]}."
      )
    return function(*args, **kwargs)

  return call
