# SPDX-License-Identifier: Apache-2.0
"""The parameters, state and metrics of a MoE layer; `move` reorders experts."""

from ep._src.base import public as _public
from ep._src.moe.losses import Metrics as Metrics
from ep._src.moe.parameters import init as init
from ep._src.moe.parameters import partition_specs as partition_specs
from ep._src.moe.parameters import State as State
from ep._src.moe.placement import move as move

__all__ = list(_public.names(globals()))
