# SPDX-License-Identifier: Apache-2.0
"""A whole MoE layer as functions over a flat dictionary of arrays.

cfg = ep.MoEConfig(hidden=512, inner=1024, num_experts=16, top_k=2)
params = ep.moe.init(key, cfg)
y, metrics = ep.moe.apply(cfg.layer(group), cfg, params, x)
"""

from ep._src.base import public as _public
from ep._src.moe.apply import apply as apply
from ep._src.moe.metrics import Metrics as Metrics
from ep._src.moe.metrics import update_bias as update_bias
from ep._src.moe.parameters import init as init
from ep._src.moe.parameters import partition_specs as partition_specs

__all__ = list(_public.names(globals()))
