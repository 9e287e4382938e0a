# SPDX-License-Identifier: Apache-2.0
"""The quantizers of a matmul, which are always None."""

import enum
from typing import Any, NamedTuple

ScalingMode = enum.Enum("ScalingMode", "NO_SCALING MXFP8_1D_SCALING")


class QuantizerSet(NamedTuple):
  """The quantizers of a matmul."""

  x: Any = None
  kernel: Any = None
  dgrad: Any = None


noop_quantizer_set = QuantizerSet()


class QuantizerFactory:
  """Makes a `QuantizerSet`."""

  @staticmethod
  def create_set(scaling_mode=ScalingMode.NO_SCALING, **options):
    """Returns a set of no quantizers, or refuses a mode that quantizes."""
    if scaling_mode != ScalingMode.NO_SCALING:
      raise NotImplementedError(
        f"{scaling_mode} quantizes matmuls, for which this package has no"
        " kernel; pass NO_SCALING, in MaxText te_gmm_quantization=te_no_quant."
      )
    return noop_quantizer_set
