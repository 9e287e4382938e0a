# SPDX-License-Identifier: Apache-2.0
"""Rounds rows to one byte an element, with a scale per block, and back."""

from ep._src.base import public as _public
from ep._src.base.quantizers import dequantize as dequantize
from ep._src.base.quantizers import quantize as quantize

__all__ = list(_public.names(globals()))
