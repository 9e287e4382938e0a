# SPDX-License-Identifier: Apache-2.0
"""The parameters, state and metrics of a MoE layer; `move` reorders experts.

`moe_layer` passes `Segments` to experts that a user writes.
"""

from ep import _public
from ep._src.moe.experts import Segments as Segments
from ep._src.moe.losses import Metrics as Metrics
from ep._src.moe.parameters import init as init
from ep._src.moe.parameters import partition_specs as partition_specs
from ep._src.moe.parameters import State as State
from ep._src.moe.parameters import with_slots as with_slots
from ep._src.moe.placement import move as move

__all__ = list(_public.names(globals()))
