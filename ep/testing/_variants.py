# SPDX-License-Identifier: Apache-2.0
"""Draws the sizes of cases, and builds the object under test for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
import dataclasses
import functools
import itertools
from typing import Any

import jax
from jax.sharding import AxisType, Mesh
import numpy as np

from ep.testing._declarations import (
  GroupedMatmul,
  Layer,
  Setting,
  Subject,
  Transport,
)
from ep.testing._dense import LayerTrial
from ep.testing._matmul import MatmulTrial
from ep.testing._round_trip import RoundTrip
from ep.testing._routings import ROUTINGS
from ep.testing._trial import Oracle, Trial


@dataclasses.dataclass(frozen=True)
class Variant:
  """The sizes and the routing, a name in `ROUTINGS`, of a case."""

  seed: int
  routing: str
  setting: Setting

  def __str__(self) -> str:
    """Returns a case's id."""
    x = self.setting
    sizes = f"T{x.tokens}-K{x.top_k}-H{x.hidden}-E{x.num_experts}"
    ranks = f"-P{x.ep_size}" if x.ep_size < jax.device_count() else ""
    return f"{x.dtype}-{self.routing}-{sizes}-A{x.alignment}{ranks}"


@functools.cache
def _mesh(size: int) -> Mesh:
  every = jax.local_devices() if size == 1 else jax.devices()
  types, devices = (AxisType.Auto,), every[:size]
  return jax.make_mesh((size,), ("ep",), axis_types=types, devices=devices)


@dataclasses.dataclass(frozen=True)
class Kind:
  """The smallest and the largest sizes of a kind of cases.

  Attributes:
    experts: E, which is rounded up to a multiple of the devices unless the
      transport is `uneven`.
    routing: a routing that the kind always has, or "".
    all_tokens: the smallest number of tokens of all ranks together.
    of: the classes that the kind is for.
  """

  tokens: tuple[int, int]
  top_k: tuple[int, int]
  hidden: tuple[int, int]
  experts: tuple[int, int]
  routing: str = ""
  all_tokens: int = 0
  of: Any = Transport | Layer


# The routing of USUAL has unused choices, experts of any load, and tokens
# without experts. Each size is small in one kind, and above 256 in another.
USUAL = Kind((2, 40), (3, 6), (2, 300), (4, 20), "with_unused_choices")
_WIDE = Kind((1, 1), (2, 4), (257, 1000), (2, 12))
_MANY_EXPERTS = Kind((2, 20), (5, 16), (2, 40), (257, 320), of=Transport)
_WIDE_AND_MANY = Kind((1, 1), (5, 16), (257, 500), (257, 320), of=Transport)
_MANY_TOKENS = Kind((257, 400), (1, 1), (3, 60), (2, 8))
# One expert gets more rows than 16 bits can count.
_LONG_SEGMENTS = Kind(
  (1, 1), (1, 1), (1, 8), (2, 4), "to_one_expert", (1 << 16) + 64, Transport
)
# From each inner tuple, the kit takes the first kind that the object under test
# supports, or USUAL. Each kind compiles several programs, so there are
# few kinds. Some kinds are too large for the oracle of a layer, which applies
# each expert to each token.
_KINDS: tuple[tuple[Kind, ...], ...] = (
  (),
  (_WIDE_AND_MANY, _WIDE, _MANY_EXPERTS),
  (_LONG_SEGMENTS, _MANY_TOKENS),
)
# A group of a matmul has few or many rows, and sums have few or many terms.
_MATMUL_KINDS: tuple[tuple[Kind, ...], ...] = tuple(
  (dataclasses.replace(kind, top_k=(1, 1), of=GroupedMatmul),)
  for kind in (
    dataclasses.replace(USUAL, tokens=(30, 300)),
    Kind((200, 400), (1, 1), (257, 500), (2, 6), "empty_experts"),
    dataclasses.replace(_MANY_EXPERTS, tokens=(257, 400)),
    _LONG_SEGMENTS,
  )
)
_TRIES = 1000  # attempts to draw supported sizes


class Draw:
  """Draws variants. Equal seeds give equal variants."""

  def __init__(self, subject: Subject, seed: int):
    self._subject, self._seed = subject, seed
    is_matmul = isinstance(subject, GroupedMatmul)
    self._kinds = _MATMUL_KINDS if is_matmul else _KINDS
    self._devices = 1 if is_matmul else jax.device_count()
    self._rng = np.random.default_rng(seed)
    # Each dtype and each alignment is used once before any is used again.
    self._dtypes, self._alignments = map(
      self._shuffled, (subject.dtypes, subject.alignments)
    )

  def _shuffled(self, names: Iterable[Any]) -> Iterator[Any]:
    return itertools.cycle(self._rng.permutation(list(names)).tolist())

  def every_kind(self) -> list[Variant]:
    """Draws variants with every kind, routing, dtype and alignment."""
    subject = self._subject
    count = max(map(len, (self._kinds, subject.dtypes, subject.alignments)))
    kinds = itertools.islice(itertools.cycle(self._kinds), count)
    bases = [base for group in kinds for base in self.one(*group)]
    # A case of long segments takes the longest time, so it has one routing.
    short = [x for x in bases if x.routing != _LONG_SEGMENTS.routing]
    others = sorted(ROUTINGS.keys() - {x.routing for x in bases})
    routings, share = self._shuffled(others), -(-len(others) // len(short))
    return [
      dataclasses.replace(base, routing=routing)
      for base in bases
      for routing in (
        base.routing,
        *itertools.islice(routings, share * (base in short)),
      )
      if routing
    ]

  def one(
    self,
    *kinds: Kind,
    too_small: bool = False,
    ep_size: int | None = None,
  ) -> list[Variant]:
    """Draws a variant; returns an empty list if no drawn sizes are supported.

    Args:
      kinds: the method uses the first supported kind; USUAL comes last.
      too_small: whether the capacity is less than one rank's tokens may need.

    Raises:
      ValueError: the tolerance is too large for all drawn sizes.
    """
    subject, refusal = self._subject, None
    dtype, alignment = next(self._dtypes), next(self._alignments)
    for kind in (*kinds, USUAL):
      for _ in range(_TRIES * isinstance(subject, kind.of)):
        setting = self._setting(kind, dtype, alignment, ep_size, too_small)
        if subject.supports is None or subject.supports(setting):
          try:
            subject.tolerance.limit(setting)
            return [Variant(self._seed, kind.routing, setting)]
          except ValueError as error:
            refusal = error
    if refusal:
      raise refusal
    return []

  def _setting(
    self,
    kind: Kind,
    dtype: str,
    alignment: int,
    ep_size: int | None,
    too_small: bool,
  ) -> Setting:
    def between(low: int, high: int) -> int:
      """Draws a number; each power of two is equally likely."""
      return int(low * ((high + 1) / low) ** self._rng.random())

    devices = self._devices
    ranks = ep_size or devices
    tokens = max(between(*kind.tokens), -(-kind.all_tokens // devices))
    experts = max(2, between(*kind.experts))
    if not getattr(self._subject, "uneven", False):
      experts = -(-experts // devices) * devices
    top_k = min(between(*kind.top_k), experts)
    blocks = 0
    if too_small:
      tokens += alignment
      enough = -(-tokens * min(top_k, ranks) // alignment)
      blocks = int(self._rng.integers(1, enough))
    hidden = between(*kind.hidden)
    local, spare = -(-experts // ranks), int(self._rng.integers(9))
    most = ranks * tokens * min(top_k, local) + spare
    blocks = blocks or -(-(most + local * (alignment - 1)) // alignment)
    return Setting(
      mesh=_mesh(ranks),
      num_experts=experts,
      top_k=top_k,
      tokens=tokens,
      hidden=hidden,
      capacity=blocks * alignment,
      alignment=alignment,
      dtype=np.dtype(jax.numpy.dtype(dtype)),
    )


_TRIALS: dict[type[Subject], Callable[[Any, Setting], Trial]] = {
  Transport: RoundTrip,
  Layer: LayerTrial,
  GroupedMatmul: MatmulTrial,
}


class Bench:
  """The object under test, with the `Trial` and the oracles of each setting."""

  def __init__(self, subject: Subject):
    (trial,) = (_TRIALS[x] for x in _TRIALS if isinstance(subject, x))
    self._trial = functools.cache(functools.partial(trial, subject))
    self._oracles: dict[Variant, Oracle] = {}

  def begin(
    self, variant: Variant
  ) -> tuple[Trial, Oracle, np.random.Generator]:
    """Returns a trial, the oracle of the routing, and a random generator."""
    trial = self._trial(variant.setting)
    seeds = [variant.seed, *variant.routing.encode()]
    if variant not in self._oracles:
      rng = np.random.default_rng(seeds)
      self._oracles[variant] = trial.routed(ROUTINGS[variant.routing], rng)
    return trial, self._oracles[variant], np.random.default_rng([*seeds, 1])
