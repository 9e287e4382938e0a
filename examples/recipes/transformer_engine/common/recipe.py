# SPDX-License-Identifier: Apache-2.0
"""The recipes for quantization, none of which can be made."""


class Recipe:
  """A recipe. Programs without quantization have None instead."""

  def __init__(self, **options):
    raise NotImplementedError(
      f"{type(self).__name__} quantizes matmuls, for which this package has no"
      " kernel; pass no recipe, in MaxText quantization=te_no_quant."
    )


DelayedScaling = type("DelayedScaling", (Recipe,), {})
Float8CurrentScaling = type("Float8CurrentScaling", (Recipe,), {})
MXFP8BlockScaling = type("MXFP8BlockScaling", (Recipe,), {})
NVFP4BlockScaling = type("NVFP4BlockScaling", (Recipe,), {})
