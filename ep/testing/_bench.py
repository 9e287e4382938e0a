# SPDX-License-Identifier: Apache-2.0
"""Builds what a case needs: the subject in a setting, and an oracle."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax.sharding import AxisType
import numpy as np

from ep.testing._dense import LayerTrial
from ep.testing._round_trip import RoundTrip
from ep.testing._routings import ROUTINGS
from ep.testing._subjects import Layer, Setting, Subject
from ep.testing._trial import Trial

TOKENS, HIDDEN, TOP_K = 5, 8, 3
LOCAL_EXPERTS = 2  # of a rank, if there are several
# It has unused choices, experts of any load, and tokens without any.
TYPICAL = "with_unused_choices"


@dataclasses.dataclass(frozen=True)
class Variant:
  """The sizes and the routing of a case.

  Attributes:
    dtype: of the tokens.
    routing: a name in `ROUTINGS`.
    ep_size: P; None stands for all devices.
    alignment: of slabs.
    capacity: C, before it is rounded up to a multiple of the alignment; None
      has room for every routing.
    hidden: H.
  """

  dtype: str
  routing: str = TYPICAL
  ep_size: int | None = None
  alignment: int = 1
  capacity: int | None = None
  hidden: int = HIDDEN

  def __str__(self) -> str:
    """Returns the words of a case's id."""
    words = [self.dtype, self.routing]
    if self.ep_size:
      words.append(f"ep{self.ep_size}")
    if self.alignment > 1:
      words.append(f"alignment{self.alignment}")
    return "-".join(words)

  def setting(self) -> Setting:
    """Returns the sizes with a mesh of this process's devices, or of all."""
    size = self.ep_size or jax.device_count()
    experts = LOCAL_EXPERTS * max(2, jax.device_count())
    local = experts // size
    worst = size * TOKENS * min(TOP_K, local) + local * (self.alignment - 1)
    slots = worst if self.capacity is None else self.capacity
    return Setting(
      mesh=jax.make_mesh(
        (size,),
        ("ep",),
        axis_types=(AxisType.Auto,),
        devices=jax.devices()[:size],
      ),
      num_experts=experts,
      top_k=TOP_K,
      tokens=TOKENS,
      hidden=self.hidden,
      capacity=-(-slots // self.alignment) * self.alignment,
      alignment=self.alignment,
      dtype=np.dtype(jax.numpy.dtype(self.dtype)),
    )


def variant_of(
  subject: Subject, routing: str = TYPICAL, **sizes: Any
) -> Variant:
  """Returns a variant with the first dtype and the least alignment."""
  sizes = {"alignment": min(subject.alignments)} | sizes
  return Variant(subject.dtypes[0], routing, **sizes)


class Bench:
  """A subject, and what was built of it: one `Trial` for each setting."""

  def __init__(self, subject: Subject):
    self.subject = subject
    self._trials: dict[Setting, Trial] = {}

  def trial(self, setting: Setting) -> Trial:
    """Builds the subject for a setting, unless it has been built already."""
    if setting not in self._trials:
      make: Callable[..., Trial]
      make = LayerTrial if isinstance(self.subject, Layer) else RoundTrip
      self._trials[setting] = make(self.subject, setting)
    return self._trials[setting]

  def limit(self, setting: Setting, numbers: str) -> float:
    """Returns the limit of an error; sums of whole numbers have none."""
    if numbers == "whole":
      return 0
    return self.subject.tolerance.limit(setting)

  def begin(self, variant: Variant) -> tuple[Any, Any, np.random.Generator]:
    """Returns a trial, the oracle of the routing, and a source of numbers."""
    trial = self.trial(variant.setting())
    setting = trial.setting
    rng = np.random.default_rng(list(variant.routing.encode()))
    shape = setting.ep_size * setting.tokens, setting.top_k
    idx = ROUTINGS[variant.routing](rng, shape, setting.num_experts)
    return trial, trial.oracle(idx.astype(np.int32)), rng
