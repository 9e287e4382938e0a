# SPDX-License-Identifier: Apache-2.0
"""moe_layer: a feed-forward layer of experts, for a given routing."""

from __future__ import annotations

from collections.abc import Sequence
import functools
import math
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from ep._src.base import arguments, arrays
from ep._src.base.group import Sizes
from ep._src.base.layer import check_layer, EpLayerConfig
from ep._src.matmul import implementations
from ep._src.matmul.implementations import Implementation
from ep._src.moe import batching
from ep._src.moe.chunks import through_experts
from ep._src.moe.experts import Activation, Experts, Network
from ep._src.ops.dispatch import check_rows
from ep._src.ops.handle import EpHandle, Routing
from ep._src.ops.prepare import check_choices
from ep._src.ops.views import EXPERTS, mapped, ROUTING_KINDS, TOKENS, View


@overload
def moe_layer(
  layer: EpLayerConfig,
  tokens: jax.Array,
  topk_idx: jax.Array,
  topk_weights: jax.Array,
  *,
  w_up: jax.Array | None = None,
  w_down: jax.Array | None = None,
  w_gate: jax.Array | None = None,
  activation: Activation = jax.nn.silu,
  experts: Network | None = None,
  params: Any = None,
  implementation: Implementation = None,
  return_handle: Literal[False] = False,
  pad: bool = False,
) -> jax.Array: ...
@overload
def moe_layer(
  layer: EpLayerConfig,
  tokens: jax.Array,
  topk_idx: jax.Array,
  topk_weights: jax.Array,
  *,
  w_up: jax.Array | None = None,
  w_down: jax.Array | None = None,
  w_gate: jax.Array | None = None,
  activation: Activation = jax.nn.silu,
  experts: Network | None = None,
  params: Any = None,
  implementation: Implementation = None,
  return_handle: Literal[True],
  pad: bool = False,
) -> tuple[jax.Array, EpHandle]: ...
def moe_layer(
  layer: EpLayerConfig,
  tokens: jax.Array,
  topk_idx: jax.Array,
  topk_weights: jax.Array,
  *,
  w_up: jax.Array | None = None,
  w_down: jax.Array | None = None,
  w_gate: jax.Array | None = None,
  activation: Activation = jax.nn.silu,
  experts: Network | None = None,
  params: Any = None,
  implementation: Implementation = None,
  return_handle: bool = False,
  pad: bool = False,
) -> jax.Array | tuple[jax.Array, EpHandle]:
  """Applies a mixture-of-experts feed-forward layer, spread over ranks.

  Collective over the EP domain. The result for a token x is the weighted sum of
  the outputs of its experts. The output of expert e is

      (activation(x @ w_gate[e]) * (x @ w_up[e])) @ w_down[e]

  as in Mixtral and DeepSeek, or activation(x @ w_up[e]) @ w_down[e] without
  gates. `route_topk` can choose the experts:

      topk = ep.route_topk(tokens @ w_router, layer.top_k)
      out = ep.moe_layer(layer, tokens, *topk, w_gate=..., w_up=..., w_down=...)

  `experts` replaces the network of an expert by a function of yours:

      def experts(segments, params, rows):  # of a rank; rows [C, H]
        up = segments.matmul(rows, params["up"])
        return segments.matmul(segments.map(jnp.tanh, up), params["down"])

      out = ep.moe_layer(layer, tokens, *topk, experts=experts, params=...)

  `ep.MoE` is the layer with a router, losses, biases and shared experts.
  Differentiable in tokens, weights and parameters, in both modes and to any
  order. `jax.vmap` over tokens makes one exchange of all examples, padded as by
  `pad=True` if the ranks do not divide their number.

  With `overflow="chunk"`, if a rank needs more rows than the capacity C, its EP
  domain splits the tokens into chunks that fit with any routing, and runs one
  chunk after another. Each EP domain decides independently. A chunk has at most
  `(C - L * (alignment - 1)) // (P * min(K, L))` tokens of each rank. The
  backward pass exchanges and computes each chunk again, and adds the gradients
  of matrices in float32, from the last chunk to the first. With a capacity
  below the worst case, the layer has reverse mode, of any order, but no forward
  mode.

  Args:
    layer: the layer's configuration. Its `tail` has no effect: rows after the
      rows of the last expert are neither written nor read.
    tokens: float32, bfloat16 or float16 [..., H].
    topk_idx: int32 or int64 [..., K], as in `ep_prepare`.
    topk_weights: float [..., K], as in `ep_dispatch`.
    w_up: [L, H, F] in the local view, [P * L, H, F] in the global view, sharded
      over the EP axis; slots without an expert have any matrices. All matrices
      have the dtype of the tokens.
    w_down: [L, F, H], or [P * L, F, H].
    w_gate: like `w_up`, or None.
    activation: an elementwise function, hashable and without mutable state,
      because it is a key of compiled programs. If it closes over traced values,
      such as a learned slope, no program is cached, and the activation is
      computed for all rows of the capacity.
    experts: a function of `ep.moe.Segments`, a rank's `params` and the received
      rows [C, H], which returns the experts' outputs [C, H]. Without `jax.jit`,
      each call compiles. With `overflow="chunk"`, the function must not close
      over values that are differentiated.
    params: a pytree of float arrays whose first axis is the rank's L experts in
      the local view, and the P * L experts of all ranks in the global view,
      sharded over the EP axis. Broadcast a parameter that experts share.
    implementation: of the experts' products and of `Segments.matmul`, as in
      `ep.grouped_matmul`.
    return_handle: whether to also return the handle, for `ep.describe` or more
      ops with the same routing. With `overflow="chunk"` it is the handle of one
      exchange of all tokens. If its `max_recv_tokens` exceeds its `capacity`,
      it counts drops, although the layer dropped nothing.
    pad: whether, in the global view, the first axis of the tokens may be no
      multiple of the number of ranks, such as a batch of 1 when text is
      sampled. The layer then adds tokens that visit no expert, and the result
      is replicated. The handle has all tokens, also added ones, in one axis.

  Returns:
    [..., H], like `tokens`, also in its sharding over Explicit mesh axes; with
    `return_handle`, a tuple of it and the `EpHandle`.

  Raises:
    ValueError, TypeError: a shape or dtype does not fit; with
      `overflow="chunk"`, one token of each rank may need more rows than the
      capacity, or an activation closes over traced values.
    ep.EpError: when the program runs; see `ep_prepare`.
  """
  check_layer("moe_layer", layer)
  op = f'moe_layer(layer "{layer.name}")'
  arrays.function(op, "activation", activation)
  implementations.check(op, implementation)
  arguments.flag(op, "return_handle", return_handle)
  arguments.flag(op, "pad", pad)
  given = _given(op, experts, params, w_up=w_up, w_down=w_down, w_gate=w_gate)
  network = Experts(activation, network=experts, implementation=implementation)
  tokens = arrays.array(op, "tokens", tokens)
  topk_idx = arrays.array(op, "topk_idx", topk_idx)
  topk_weights = arrays.array(op, "topk_weights", topk_weights)
  routed = tokens, topk_idx, topk_weights
  view = View.of(layer.group, op)
  check = _check_matrices if experts is None else _check_params
  check(view, tokens, given)
  run = functools.partial(_run, layer, network, view)
  once = batching.padded(view, "tokens", [0, -1, 0], run)

  def call(routed: Any, params: Any, pad: bool) -> tuple[jax.Array, Any]:
    _check_routed(op, layer, routed)
    return once(routed, params, pad)

  if return_handle:
    return call(routed, given, pad)
  out: jax.Array
  out, _ = batching.examples(
    lambda *args: (call(*args)[0], ()), routed, given, pad
  )
  return out


def _given(
  op: str, experts: Network | None, params: Any, **matrices: Any
) -> Any:
  """Returns the arrays of the experts; `matrices` without the absent ones."""
  given = {k: jnp.asarray(w) for k, w in matrices.items() if w is not None}
  if experts is not None:
    arrays.function(op, "experts", experts)
    if given:
      raise TypeError(
        f"{op}: got experts and {[*given]}; pass the arrays of your experts as"
        " params."
      )
    return jax.tree.map(jnp.asarray, params)
  if params is not None or not {"w_up", "w_down"} <= given.keys():
    raise TypeError(
      f"{op}: matrices are passed by name: w_up=..., w_down=..., and w_gate=..."
      " for experts with gates; or experts=... and params=..."
    )
  return given


def _run(
  layer: EpLayerConfig,
  network: Experts,
  view: View,
  routed: Sequence[jax.Array],
  params: Any,
  token_shape: tuple[int, ...],
  size: int | None,
) -> tuple[jax.Array, EpHandle]:
  """Applies the layer in a view. Tokens after the first `size` were added."""
  del size
  num_tokens = math.prod(token_shape)
  layer.check_tokens(view.op, num_tokens)
  sizes = layer.sizes(num_tokens, tail="unspecified")
  check_rows(view.op, "tokens", routed[0], sizes)
  out: jax.Array
  out, routing = _of_rank.in_view(
    view,
    [sizes, network],
    *(params, *routed),
    keep=network.network is None and not network.is_traced(),
  )
  handle = EpHandle(*routing, layer=layer, token_shape=token_shape)
  return out, handle


@mapped(
  [EXPERTS, TOKENS, TOKENS, TOKENS], (TOKENS, ROUTING_KINDS), is_layer=True
)
def _of_rank(
  sizes: Sizes,
  experts: Experts,
  params: Any,
  tokens: jax.Array,
  topk_idx: jax.Array,
  topk_weights: jax.Array,
) -> tuple[jax.Array, Routing]:
  args = params, tokens, topk_idx, topk_weights
  return through_experts(sizes, experts, *args)


def _check_routed(
  op: str, layer: EpLayerConfig, routed: Sequence[jax.Array]
) -> None:
  """Raises unless the choices fit the layer, and the tokens the choices."""
  check_choices(op, layer, *routed[1:])
  if routed[0].shape[:-1] != routed[1].shape[:-1]:
    raise ValueError(
      f"{op}: tokens, topk_idx and topk_weights have the shapes"
      f" {', '.join(str(x.shape) for x in routed)}, but all axes but the last"
      " must be the same; route these very tokens."
    )


def _num_slots(view: View) -> int:
  """Returns the length of the axis of experts, empty slots included."""
  group = view.group
  return group.num_local_experts if view.is_local else group.num_expert_slots


def _check_matrices(
  view: View, tokens: jax.Array, params: dict[str, jax.Array]
) -> None:
  op, experts = view.op, _num_slots(view)
  hidden, inner = tokens.shape[-1], params["w_up"].shape[-1]
  for name, matrices in params.items():
    shape = (experts, hidden, inner)
    if name == "w_down":
      shape = (experts, inner, hidden)
    if matrices.shape != shape:
      which = "a rank's experts" if view.is_local else "all experts"
      raise ValueError(
        f"{op}: {name} has shape {matrices.shape}, but {shape} is expected:"
        f" a matrix for each of {which}, for tokens of hidden size {hidden} and"
        f" w_up of inner size {inner}."
      )
    if matrices.dtype != tokens.dtype:
      raise TypeError(
        f"{op}: {name} is {matrices.dtype}, but tokens are {tokens.dtype};"
        " convert one, so that it is clear which precision is meant."
      )


def _check_params(view: View, tokens: jax.Array, params: Any) -> None:
  del tokens
  op, experts = view.op, _num_slots(view)
  for path, x in jax.tree.leaves_with_path(params):
    name = "params" + jax.tree_util.keystr(path)
    arrays.check_kind(op, name, x, jnp.floating)
    arguments.check(
      x.shape[:1] == (experts,),
      op,
      f"{name} has shape {x.shape}, but [{experts}, ...] is expected: an entry"
      f" for each of {'a rank' if view.is_local else 'all'}'s experts.",
    )
