# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism for JAX: dispatch, combine, and a MoE layer of them.

    MoEConfig, MoE      a whole layer: router, exchange, experts, metrics
    moe_layer           its experts alone, for a routing that is given
    ep_bootstrap        makes the group of ranks of a mesh, an EpGroup
    EpLayerConfig       the choices of a layer of a group
    ep_prepare          exchanges the routing of a step; returns an EpHandle
    ep_dispatch         sends tokens to their experts' ranks
    ep_combine          sends the outputs back and sums them
    grouped_matmul      multiplies each expert's rows by its matrix
    route_topk          the choices and weights of a router's logits
    record, replay      keep the routings of a run, and use them again
    suggest_capacity    the rows that a layer needs, from a record
    describe, checked   say what a step did, and what was wrong
    trace, explain      say which rank the others wait for, and why
    plan, Cluster       predict what a layer's exchanges cost on a cluster
    place, Placement    find and say which rank holds which expert

`ep.launch` starts processes and joins them; `python -m ep stuck` says why a job
hangs; `ep.moe` has parameters, state and metrics of layers, `ep.presets`
configurations of published models, `ep.quant` rows of one byte with scales,
`ep.debug` a picture of a routing, `ep.lax` collectives that CPUs lack, and
`ep.testing` tests for transports and layers.
"""

import importlib as _importlib
import typing as _typing

from ep._src.base import public as _public

_public.check_jax()  # before a module imports JAX

# isort: split

from ep import debug as debug
from ep import launch as launch
from ep import lax as lax
from ep import moe as moe
from ep import presets as presets
from ep import quant as quant
from ep._src.base.contexts import checked as checked
from ep._src.base.errors import EpError as EpError
from ep._src.base.identities import keep_routing as keep_routing
from ep._src.group.bootstrap import ep_bootstrap as ep_bootstrap
from ep._src.group.bootstrap import ep_finalize as ep_finalize
from ep._src.group.bootstrap import ep_resize as ep_resize
from ep._src.group.group import EpGroup as EpGroup
from ep._src.group.group import EpLayerConfig as EpLayerConfig
from ep._src.matmul.grouped_matmul import grouped_matmul as grouped_matmul
from ep._src.matmul.ordered_sum import ordered_psum as ordered_psum
from ep._src.moe.config import MoEConfig as MoEConfig
from ep._src.moe.layer import MoE as MoE
from ep._src.moe.losses import load_balancing_loss as load_balancing_loss
from ep._src.moe.losses import router_entropy as router_entropy
from ep._src.moe.losses import router_z_loss as router_z_loss
from ep._src.moe.losses import (
  sequence_balancing_loss as sequence_balancing_loss,
)
from ep._src.moe.moe_layer import moe_layer as moe_layer
from ep._src.moe.placement import Placement as Placement
from ep._src.moe.router import route_topk as route_topk
from ep._src.moe.router import topk_from_map as topk_from_map
from ep._src.ops.combine import ep_combine as ep_combine
from ep._src.ops.dispatch import ep_dispatch as ep_dispatch
from ep._src.ops.handle import EpHandle as EpHandle
from ep._src.ops.hidden_collectives import (
  assert_no_hidden_collectives as assert_no_hidden_collectives,
)
from ep._src.ops.prepare import ep_prepare as ep_prepare
from ep._src.ops.unordered_collectives import (
  assert_ordered_collectives as assert_ordered_collectives,
)
from ep._tools.planning.cluster import Cluster as Cluster
from ep._tools.planning.place import place as place
from ep._tools.planning.plan import Forecast as Forecast
from ep._tools.planning.plan import Plan as Plan
from ep._tools.planning.plan import plan as plan
from ep._tools.records.capacity import CapacitySuggestion as CapacitySuggestion
from ep._tools.records.capacity import suggest_capacity as suggest_capacity
from ep._tools.records.describe import describe as describe
from ep._tools.records.describe import RoutingSummary as RoutingSummary
from ep._tools.records.record import record as record
from ep._tools.records.replay import Replay as Replay
from ep._tools.records.replay import replay as replay
from ep._tools.trace.explain import explain as explain
from ep._tools.trace.explain import Explanation as Explanation
from ep._tools.trace.trace import trace as trace

__version__ = "0.1.0"  # pyproject.toml reads it; MODULE.bazel has it, too
__all__ = list(_public.names(globals()) + ["testing"])


def __dir__() -> list[str]:
  return __all__


if _typing.TYPE_CHECKING:
  from ep import testing as testing
else:

  def __getattr__(name: str) -> _typing.Any:
    if name == "testing":  # which imports ep
      return _importlib.import_module("ep.testing")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
