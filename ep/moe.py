# SPDX-License-Identifier: Apache-2.0
"""The parameters, state and metrics of a MoE layer; `move` reorders experts.

`from_hf` and `to_hf` convert layers of Hugging Face models. `moe_layer` passes
`Segments` to experts that a user writes.
"""

from ep._src.base import public as _public
from ep._src.moe.experts import Segments as Segments
from ep._src.moe.losses import Metrics as Metrics
from ep._src.moe.parameters import init as init
from ep._src.moe.parameters import partition_specs as partition_specs
from ep._src.moe.parameters import State as State
from ep._src.moe.parameters import with_slots as with_slots
from ep._src.moe.placement import move as move
from ep._tools.huggingface import config_from_hf as config_from_hf
from ep._tools.huggingface import from_hf as from_hf
from ep._tools.huggingface import to_hf as to_hf

__all__ = list(_public.names(globals()))
