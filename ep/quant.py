# SPDX-License-Identifier: Apache-2.0
"""Quantizes rows to fp8 or int8 with block scales, and dequantizes them."""

from ep import _public
from ep._src.ops.quantizers import dequantize as dequantize
from ep._src.ops.quantizers import quantize as quantize

__all__ = list(_public.names(globals()))
