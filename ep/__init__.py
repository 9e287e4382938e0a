# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism for JAX: mixture-of-experts layers spread over devices.

Each device of a mesh axis owns a part of the experts. `ep_dispatch` sends every
token to the devices of its top-k experts, and `ep_combine` sends the expert
outputs back and sums them. Both are differentiable, to any order. A backend
moves the rows: "host" on CPUs, "nccl" on NVIDIA GPUs, and "xla" on any device.

    mesh = jax.make_mesh((jax.device_count(),), ("ep",))
    cfg = ep.MoEConfig(hidden=32, inner=64, num_experts=8, top_k=2)
    layer = ep.MoE(cfg, mesh)
    params = layer.init(jax.random.key(0))  # expert weights, split over "ep"
    y, metrics = jax.jit(layer)(params, x)  # x: [batch, sequence, 32]

Train a model:
    MoEConfig, MoE     a layer: router, exchange, experts, losses and metrics
    moe                parameters, state and metrics of a layer
    presets            the MoE layers of published models
    place              places experts on ranks so that the loads balance
    launch             starts the ranks of a program, and connects them

Replace an exchange:
    ep_bootstrap       connects the ranks of a mesh; returns an EpGroup
    EpLayerConfig      the sizes and policies of one layer of a group
    moe_layer          the experts and the exchange, without a router
    route_topk         chooses experts and weights from router logits
    ep_prepare         exchanges the routing of a step; returns an EpHandle
    ep_dispatch        sends tokens to the ranks of their experts
    grouped_matmul     multiplies the rows of each expert by its matrix
    ep_combine         sends the outputs back and sums them per token
    quant, lax         fp8 rows with scales; `ragged_all_to_all` on CPUs
    testing            tests of a transport or a layer against the contract

When something is wrong:
    check              raises the fault that a step returned
    checked            traces programs with checks of their results
    describe           prints the routing of a step as a table
    watch              says which processes of a hanging job lag, and why

`python -m ep info` prints the usable backends.
"""

import importlib as _importlib
import typing as _typing

from ep import _public

_public.check_jax()  # must run before ep's modules import JAX

# isort: split

from ep import launch as launch
from ep import lax as lax
from ep import moe as moe
from ep import presets as presets
from ep import quant as quant
from ep._src.base.contexts import checked as checked
from ep._src.base.errors import EpError as EpError
from ep._src.base.group import EpGroup as EpGroup
from ep._src.base.layer import EpLayerConfig as EpLayerConfig
from ep._src.group.bootstrap import ep_bootstrap as ep_bootstrap
from ep._src.group.bootstrap import ep_finalize as ep_finalize
from ep._src.group.bootstrap import ep_resize as ep_resize
from ep._src.lax.ordered_sum import ordered_psum as ordered_psum
from ep._src.matmul.grouped_matmul import grouped_matmul as grouped_matmul
from ep._src.moe.config import MoEConfig as MoEConfig
from ep._src.moe.layer import MoE as MoE
from ep._src.moe.losses import load_balancing_loss as load_balancing_loss
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
from ep._src.ops.prepare import ep_prepare as ep_prepare
from ep._src.ops.prepare import keep_routing as keep_routing
from ep._tools.check import check as check
from ep._tools.collectives.hidden import (
  assert_no_hidden_collectives as assert_no_hidden_collectives,
)
from ep._tools.collectives.unordered import (
  assert_ordered_collectives as assert_ordered_collectives,
)
from ep._tools.describe import describe as describe
from ep._tools.describe import RoutingSummary as RoutingSummary
from ep._tools.place import place as place
from ep._tools.watch.watch import watch as watch

__version__ = "0.1.0"  # also in MODULE.bazel; pyproject.toml reads it
__all__ = list(_public.names(globals()) + ["testing"])


def __dir__() -> list[str]:
  return __all__


if _typing.TYPE_CHECKING:
  from ep import testing as testing
else:

  def __getattr__(name: str) -> _typing.Any:
    if name == "testing":  # lazily, because ep.testing imports ep
      return _importlib.import_module("ep.testing")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
