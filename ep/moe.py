# SPDX-License-Identifier: Apache-2.0
"""Has the parameters, state and metrics of a MoE layer, and moves experts."""

from ep._src.base import public as _public
from ep._src.moe.metrics import Metrics as Metrics
from ep._src.moe.move import move as move
from ep._src.moe.parameters import init as init
from ep._src.moe.parameters import partition_specs as partition_specs
from ep._src.moe.state import State as State

__all__ = list(_public.names(globals()))
