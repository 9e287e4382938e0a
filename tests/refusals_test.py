# SPDX-License-Identifier: Apache-2.0
"""Each argument of each public function is refused by name if it is wrong.

A row is a change of good arguments, the type of the error, and a pattern that
its message matches. Arrays are refused when a program is traced.
"""

import functools
import inspect
import math
import operator
import re

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec
import numpy as np
import pytest

from conftest import make_mesh
import ep
from groups import BACKEND, E, group, H, K, layer, T, with_values
from layer_steps import draw_params

N = 4 * T  # tokens of all ranks
C = 4 * T * 2  # the worst case with two local experts
V, F = ValueError, TypeError
PLAIN = dict(
  hidden=H, inner=6, num_experts=E, top_k=K, gated=False, name="moe_3"
)


def zeros(*shape, dtype=np.float32):
  return np.zeros(shape, dtype)


def ids(*shape, dtype=np.int32):
  return np.full(shape, -1, dtype)


IDS, WEIGHTS, ROWS = ids(N, K), zeros(N, K), zeros(4, C, H)
KEY = jax.random.key(0)
SLICES = "input_offsets", "send_sizes", "output_offsets", "recv_sizes"
CHUNK = dict(overflow="chunk", capacity_factor=0.1)
NAN, BOTH = math.nan, PartitionSpec(("dp", "ep"))


def handle(where=group):
  return ep.ep_prepare(ep.EpLayerConfig(where(), name="moe_3"), IDS)


def narrow():
  return group(max_token_dtype=jnp.bfloat16)


def fp8(**options):
  rows = zeros(N, H, dtype=jnp.float8_e4m3fn)
  return dict(tokens=rows, scales=zeros(N, 1)) | options


def moe(params=None, x=None, config=None, where=None, **call):
  """Calls an `ep.MoE` of `PLAIN`, changed by `config`."""
  config = ep.MoEConfig(**(PLAIN | (config or {})))
  made = ep.MoE(config, where or group("ep4"))
  good = draw_params(config, np.zeros)
  params = good | params if isinstance(params, dict) else params or good
  return made(params, zeros(N, H) if x is None else x, **call)


def narrow_experts():
  shapes = dict(w_up=(E, H, 6), w_down=(E, 6, H))
  return {n: zeros(*s, dtype=jnp.bfloat16) for n, s in shapes.items()}


def own(experts, params=None):
  """Returns a change to a function of the caller, by default with matrices."""
  params = dict(w=zeros(E, H, 9)) if params is None else params
  return dict(experts=experts, params=params, w_up=None, w_down=None)


def ragged(**arguments):
  """Calls `ep.lax.ragged_all_to_all` in a shard_map over "ep"."""
  call = functools.partial(ep.lax.ragged_all_to_all, **arguments)
  out = PartitionSpec("ep")
  mapped = jax.shard_map(call, mesh=group().mesh, in_specs=(), out_specs=out)
  return jax.eval_shape(mapped)


# For each function: good arguments, and the rows.
TABLE = {
  "ep_bootstrap": lambda: (
    dict(mesh=make_mesh({"dp": 2, "ep": 2}), num_experts=E, backend=BACKEND),
    [
      (dict(mesh=None), F, "mesh = None .*jax.sharding.Mesh"),
      (dict(mesh=AbstractMesh((0,), ("ep",))), V, "{'ep': 0} has no devices"),
      (
        dict(mesh=AbstractMesh((4,), ("ep",)), backend="host"),
        V,
        "needs a mesh of devices",
      ),
      (dict(axis_name="expert"), V, "axis_name = 'expert'.*'dp', 'ep'"),
      (dict(data_axes=("tp",)), V, "data_axes = .'tp'.*'dp'"),
      (dict(data_axes=("ep",)), V, "data_axes"),
      (dict(data_axes="dp"), F, "data_axes = 'dp' is a str.*tuple"),
      (dict(num_experts=2**31), V, "num_experts = 2147483648.*2.31"),
      (dict(max_tokens_per_rank=0), V, "max_tokens_per_rank = 0"),
      (
        dict(max_tokens_per_rank=2**29, top_k=2),
        V,
        "2147483652 rows .*536870912 tokens.*top_k = 2",
      ),
      (dict(hidden_dim="64"), F, "hidden_dim = '64' is a str.*integer"),
      (dict(top_k=E + 1), V, "top_k = 9.*8"),
      (dict(top_k=True), F, "top_k = True is a bool.*integer"),
      (dict(recv_capacity_per_rank=0), V, "recv_capacity_per_rank = 0"),
      (dict(alignment=-1), V, "alignment = -1"),
      (dict(max_token_dtype=jnp.int32), V, "max_token_dtype = int32"),
      (dict(max_token_dtype="half precision"), F, "max_token_dtype = 'half"),
      (dict(overflow="wrap"), V, "overflow = 'wrap'.*error.*drop"),
      (dict(overflow=np.arange(2)), V, r"overflow = array\(\[0, 1\]\).*error"),
      (dict(drop_by="first"), V, "drop_by = 'first'"),
      (dict(backend="gloo"), V, "backend = 'gloo'.*'host'"),
      (dict(backend="nccl"), V, "backend = .nccl.*cpu"),
      (dict(errors="print"), V, "errors = 'print'.*raise.*flag"),
      (dict(max_num_sms=-1), V, "max_num_sms = -1"),
      (dict(timeout_s=NAN), V, "timeout_s = nan"),
      (dict(exit_after_s=0), V, "exit_after_s = 0"),
      (dict(name=5), F, "name = 5 is a int.*string"),
    ],
  ),
  "ep_finalize": lambda: (
    dict(group=None),
    [(dict(group="g"), F, "group is a str, but the type EpGroup.*ep_boot")],
  ),
  "ep_resize": lambda: (
    dict(group=group()),
    [
      (dict(group=None), F, "group is a NoneType, but the type EpGroup"),
      (dict(mesh=None), F, "mesh cannot change.*hidden_dim"),
      (dict(top_k=E + 1), V, "a layer of only defaults fails: .*top_k = 9"),
    ],
  ),
  "EpLayerConfig": lambda: (
    dict(group=group(), name="moe_3"),
    [
      (dict(group=layer()), F, "group is a EpLayerConfig.*ep_bootstrap"),
      (dict(group=group(top_k=None)), V, "group has a top_k; give the layer"),
      (dict(top_k=E + 1), V, "moe_3.*top_k = 9.*8"),
      (dict(alignment=2**30), V, "alignment = 1073741824.*32 bits"),
      (
        dict(alignment=4, recv_capacity_per_rank=4),
        V,
        "recv_capacity_per_rank = 4.*at least 8",
      ),
      (
        dict(alignment=4, recv_capacity_per_rank=10),
        V,
        "recv_capacity_per_rank = 10.*alignment = 4",
      ),
      (dict(capacity_factor=0.0), V, "capacity_factor = 0.0.*be positive"),
      (dict(capacity_multiple=0), V, "capacity_multiple = 0"),
      (dict(alignment=2, capacity_multiple=2**31 - 1), V, "in 32 bits"),
      (dict(overflow="wrap"), V, "overflow = 'wrap'.*error.*drop"),
      (dict(drop_by="fair"), V, 'drop_by = .fair.*overflow="drop"'),
      (dict(tail="nan"), V, "tail = 'nan'.*zero.*unspecified"),
      (dict(wire="fp8"), V, "wire = 'fp8'.*mxfp8"),
      (dict(name="a\nb"), V, r"'a\\nb', but it must have no characters"),
    ],
  ),
  "ep_prepare": lambda: (
    dict(layer=layer(name="moe_3"), topk_idx=IDS),
    [
      (dict(layer=group()), F, "layer is a EpGroup.*EpLayerConfig.group"),
      (dict(layer=layer(overflow="chunk", capacity_factor=1.0)), V, "ep.MoE"),
      (dict(topk_idx=None), F, "moe_3.*topk_idx = None .*an array is expected"),
      (dict(topk_idx=ids(N)), V, r"moe_3.*topk_idx.*\(20,\).*top_k\] = .*3"),
      (dict(topk_idx=WEIGHTS), F, "topk_idx is float32.*int32"),
      (dict(topk_idx=ids(4, 2, 3, K)), V, "6 tokens.*max_tokens_per_rank = 5"),
      (dict(topk_idx=ids(N - 1, K)), V, r"\(19, 3\).*multiple of 4.*pad=True"),
      (dict(topk_weights=zeros(N)), V, r"topk_weights has shape \(20,\)"),
      (
        dict(layer=layer(overflow="drop", drop_by="fair")),
        V,
        "topk_weights is None; pass the weights",
      ),
    ],
  ),
  "ep_dispatch": lambda: (
    dict(handle=handle(), tokens=zeros(N, H), topk_weights=WEIGHTS),
    [
      (dict(handle=group()), F, "handle is a EpGroup.*ep_prepare returned"),
      (dict(tokens=None), F, "moe_3.*tokens = None .*an array is expected"),
      (dict(topk_weights=None), F, "topk_weights = None .*an array"),
      (dict(tokens=zeros(N, H + 1)), V, "moe_3.*tokens.*8.*hidden_dim = 7"),
      (dict(tokens=zeros(N, 0)), V, r"tokens.*\(20, 0\).*least one element"),
      (dict(tokens=zeros(N - 4, H)), V, r"tokens.*\(16, 7\).*5"),
      (dict(tokens=ids(N, H)), F, "tokens is int32.*float32"),
      (dict(handle=handle(narrow)), F, "float32.*max_token_dtype is bfloat16"),
      (dict(topk_weights=zeros(N, 2)), V, r"topk_weights.*\(20, 2\).*3"),
      (dict(topk_weights=ids(N, K)), F, "topk_weights is int32.*float"),
      (dict(scales=zeros(N, 1)), F, "tokens is float32"),
      (fp8(scales=None), F, "scales="),
      (fp8(scales=ids(N, 1)), F, "scales is int32"),
      (fp8(scales=zeros(4, 1)), V, "at least one scale"),
    ],
  ),
  "ep_combine": lambda: (
    dict(handle=handle(), expert_out=ROWS),
    [
      (dict(handle=[1]), F, "handle is a list.*ep_prepare returned"),
      (dict(expert_out=None), F, "expert_out = None .*an array is expected"),
      (dict(expert_out=zeros(4, C - 1, H)), V, r"expert_out.*\(4, 39, 7\).*40"),
      (dict(expert_out=zeros(4, C, H + 1)), V, "expert_out.*8.*hidden_dim = 7"),
      (dict(expert_out=ids(4, C, H)), F, "expert_out is int32.*float32"),
      (dict(weights=zeros(N, K)), V, r"weights is float32\[20, 3\]"),
      (dict(weights=ids(4, C)), V, "weights is int32.*floating"),
    ],
  ),
  "moe_layer": lambda: (
    dict(
      layer=layer(name="moe_3"),
      tokens=zeros(N, H),
      topk_idx=IDS,
      topk_weights=WEIGHTS,
      w_up=zeros(E, H, 2),
      w_down=zeros(E, 2, H),
    ),
    [
      (dict(layer=group()), F, "layer is a EpGroup.*EpLayerConfig.group"),
      (dict(tokens=None), F, "moe_3.*tokens = None .*an array is expected"),
      (dict(topk_weights=None), F, "topk_weights = None .*an array"),
      (dict(tokens=zeros(6, H)), V, r"moe_3.*\(6, 7\), \(20, 3\).*route these"),
      (dict(tokens=zeros(N, H, dtype=np.float16)), F, "float32.*float16"),
      (dict(topk_idx=ids(8, K)), V, r"topk_idx.*\(8, 3\)"),
      (dict(topk_weights=zeros(8, K)), V, r"topk_weights.*\(8, 3\)"),
      (dict(w_up=None), F, "moe_3.*w_up=..., w_down=..."),
      (dict(w_up=zeros(E, H + 1, 2)), V, r"w_up has shape \(8, 8, 2\)"),
      (dict(w_up=zeros(2, H, 2)), V, "each of all experts"),
      (dict(w_down=zeros(E, H, 2)), V, r"w_down has shape \(8, 7, 2\)"),
      (dict(w_down=zeros(E, 2, H, dtype=np.float16)), F, "w_down is float16"),
      (dict(w_gate=zeros(E, H, 3)), V, r"w_gate has shape \(8, 7, 3\)"),
      (dict(activation="gelu"), F, "activation.*'gelu' is a str.*jax.nn.gelu"),
      (dict(experts=max), F, r"experts and \['w_up', 'w_down'\]"),
      (dict(experts=3, w_up=None, w_down=None), F, "experts = 3"),
      (dict(params=zeros(E, 1)), F, "or experts=... and params=..."),
      (own(lambda s, p, x: x[:, 1:]), V, "like the rows"),
      (
        own(lambda s, p, x: s.matmul(x[:, 1:], p["w"])),
        V,
        r"got rows \(\d+, 6\) and matrices \(\d, 7, 9\); expected",
      ),
      (
        own(lambda s, p, x: s.map(jnp.add, x, p["w"][:, 0])),
        V,
        r"got arrays of shapes \(\d+, 7\), \(\d, 9\); expected \[\d+, ...\]",
      ),
      (own(max, zeros(3, 2)), V, r"params has shape \(3, 2\), but \[8, ...\]"),
      (own(max, ids(E, 2)), F, "params is int32"),
      (dict(implementation="fast"), V, "moe_3.*'fast'.*'tiles'.*a function"),
      (dict(return_handle=1), F, "return_handle = 1 .*True or False"),
      (dict(pad="yes"), F, "pad = 'yes' .*True or False"),
    ],
  ),
  "MoEConfig": lambda: (
    dict(PLAIN),
    [
      (dict(hidden=0), V, "moe_3.*hidden = 0, but it must be at least 1"),
      (dict(inner=0), V, "inner = 0, but it must be at least 1"),
      (dict(num_experts="8"), F, "num_experts = '8' is a str"),
      (dict(top_k=E + 1), V, "top_k = 9, but it must be in 1..num_experts = 8"),
      (dict(gated="no"), F, "gated = 'no' .* is expected"),
      (dict(activation="gelu"), F, "'gelu' is a str.*jax.nn.gelu"),
      (dict(up_activation=jnp.tanh), V, "gated = False"),
      (dict(biases=np.array([1, 0])), F, r"biases = .* is expected"),
      (dict(router_bias="no"), F, "router_bias = 'no' .* is expected"),
      (dict(shared_inner=-1), V, "shared_inner = -1"),
      (dict(weigh="never"), V, "weigh = 'never'"),
      (dict(score="relu"), V, "score = 'relu', but it must be one of"),
      (dict(normalize=None), F, "normalize = None .* is expected"),
      (dict(scale="2"), F, "scale = '2' .* is expected"),
      (dict(num_groups=3), V, "num_groups = 3 does not divide"),
      (dict(num_groups=2, top_groups=3), V, "top_groups = 3"),
      (dict(num_groups=2, group_best=9), V, "group_best = 9"),
      (dict(balance="all"), V, "balance = 'all'"),
      (dict(capacity_factor=math.inf), V, "capacity_factor = inf"),
      (dict(overflow="wrap"), V, "overflow = 'wrap'"),
      (dict(drop_by="first"), V, "drop_by = 'first'"),
      (dict(token_chunks=0), V, "token_chunks = 0"),
      (dict(token_chunks=2, deterministic=True), V, "= 2, but deterministic"),
      (dict(wire="fp8"), V, "wire = 'fp8'"),
      (dict(wire="mxfp8", hidden=48), V, "rows have 48 elements"),
      (dict(tp_axis=1), F, "tp_axis = 1 .* is expected"),
      (dict(tp_axis="x", fsdp_axis="x"), V, "tp_axis and fsdp_axis are both"),
      (dict(fsdp_axis=0), F, "fsdp_axis = 0 .* is expected"),
      (dict(deterministic=1), F, "deterministic = 1 .* is expected"),
      (dict(dtype="int8"), V, "dtype = int8"),
      (dict(implementation=["tiles"]), V, r"implementation = \['tiles'\]"),
      (
        dict(implementation="tiles", deterministic=True),
        V,
        "deterministic = True",
      ),
      (dict(name="moe\0"), V, r"name = 'moe\\x00'"),
    ],
  ),
  "MoE": lambda: (
    dict(config=ep.MoEConfig(**PLAIN), where=group("ep4")),
    [
      (dict(config=PLAIN), F, "config is a dict, but the type MoEConfig"),
      (dict(where=4), F, "MoE: where = 4 is a int, but a mesh or"),
      (dict(name=5), F, "name = 5 is a int"),
      (dict(timeout_s=3), F, r"\['timeout_s'\] are options of ep_bootstrap"),
      *(
        (dict(config=ep.MoEConfig(**(PLAIN | change))), V, words)
        for change, words in [
          (dict(num_experts=4), "num_experts = 4, but the group has 8"),
          (dict(hidden=H + 1), "but the group's rows have hidden_dim"),
          (dict(tp_axis="ep"), "tp_axis = 'ep', but it must be one of the"),
          (dict(drop_by="fair", capacity_factor=1.0), 'overflow="drop" as'),
        ]
      ),
      (
        dict(
          config=ep.MoEConfig(**PLAIN, deterministic=True),
          where=with_values(group("ep4"), backend="nccl"),
        ),
        V,
        'deterministic.*backend="xla"',
      ),
      (
        dict(
          config=ep.MoEConfig(**PLAIN, tp_axis="dp"), where=group("dp2_ep2")
        ),
        V,
        r"splits tokens.*data_axes=\(\)",
      ),
    ],
  ),
  "MoE.__call__": lambda: (
    {},
    [
      (dict(x=ids(N, H), config=dict(dtype=jnp.float32)), F, "x is int32, but"),
      (dict(x=zeros(N, H + 1)), V, r"moe_3.*x has shape \(20, 8\)"),
      (dict(x=zeros(N, H, dtype=jnp.bfloat16)), F, "is f.*x is bf.*=jnp.bfl"),
      (dict(params=narrow_experts()), F, "is bf.*, but x is f.*e=jnp.bfloat16"),
      (
        dict(
          x=zeros(N, H, dtype=jnp.bfloat16),
          params=narrow_experts(),
          config=dict(deterministic=True),
        ),
        F,
        r"\['w_\w+'\] is bfl.*, but deterministic",
      ),
      (
        dict(
          x=zeros(6400, H),
          config=dict(deterministic=True, **CHUNK),
          where=group("ep4", max_tokens_per_rank=None),
        ),
        V,
        "moe_3.*deterministic = True",
      ),
      (dict(config=CHUNK), V, "may need.*; raise capacity_fa"),
      (dict(config=CHUNK | dict(token_chunks=3)), V, "= 3 splits the tokens"),
      (dict(params=7), V, "params holds <class 'int'>, but the config has"),
      (dict(params=dict(more=1)), V, "params holds .*'more'.*but the config"),
      (dict(params=dict(router=zeros(H, 7))), V, r"params\['router'\] has sha"),
      (dict(params=dict(w_up=None)), F, r"params\['w_up'\] = None is a NoneT"),
      (dict(state=np.zeros(E)), F, "is a ndarray, but the type State .*ep.moe"),
      (dict(mask=np.ones(5, bool)), V, r"mask has shape \(5,\)"),
      (dict(forced_idx=np.zeros((N, K))), F, "forced_idx is float64|float32"),
      (dict(captured_idx=ids(N)), V, r"captured_idx has shape \(20,\)"),
      (dict(pad=1), F, "pad = 1 .*True or False"),
      (dict(config=dict(num_experts=7)), V, "slots with ep.moe.with_slots"),
      (dict(placement=[1, 0]), F, "is a list, but the type Placement"),
      (
        dict(placement=ep.Placement(range(E + 1))),
        V,
        r"placement has slots \(9,\), but 8 are expected: one for",
      ),
      (dict(placement=ep.Placement([range(E)])), V, "are of several layers"),
    ],
  ),
  "grouped_matmul": lambda: (
    dict(rows=zeros(3, 5), matrices=zeros(2, 5, 7), group_sizes=ids(2) + 1),
    [
      (dict(rows=None), F, "grouped_matmul: rows = None .*an array"),
      (dict(rows=zeros(1, 3, 5)), V, r"rows \(1, 3, 5\), matrices"),
      (
        dict(rows=ids(3, 5), matrices=ids(2, 5, 7)),
        F,
        "rows are int32, but fl",
      ),
      (dict(matrices=zeros(2, 4, 7)), V, r"matrices \(2, 4, 7\)"),
      (dict(matrices=zeros(2, 5, 7, dtype=np.float16)), V, "convert one"),
      (dict(group_sizes=ids(3)), V, r"\(3,\)"),
      (dict(group_sizes=zeros(2)), F, "group_sizes is float32"),
      (dict(implementation="fast"), V, "'fast'.*'ragged_dot'.*a function"),
      (dict(implementation=lambda *_: 1), V, r"returned int.*array \[3, 7\]"),
      (dict(implementation=lambda x, *_: x), V, r"returned \(3, 5\), but an"),
      (dict(implementation="mgpu"), V, "is for an NVIDIA GPU.*is for cpu"),
    ],
  ),
  "route_topk": lambda: (
    dict(logits=zeros(3, E), top_k=2),
    [
      (dict(logits=None), F, "route_topk: logits = None .*an array"),
      (dict(logits=ids(3, E)), F, "logits is int32, but floats"),
      (dict(top_k=E + 1), V, "top_k = 9, but it must be in 1..num_exp.* = 8"),
      (dict(top_k=2.0), F, "top_k = 2.0 is a float"),
      (dict(score="relu"), V, "score = 'relu'"),
      (dict(normalize="no"), F, "normalize = 'no'"),
      (dict(scale=NAN), V, "scale = nan"),
      (dict(selection_bias=zeros(3)), V, r"selection_bias has shape \(3,\)"),
      (
        dict(mask=zeros(3)),
        F,
        "is float32, but bools are expected; pass mask != 0",
      ),
      (dict(mask=np.ones(2, bool)), V, r"mask has shape \(2,\)"),
      (dict(num_groups=3), V, "num_groups = 3 does not divide"),
      (dict(top_k=5, num_groups=4, top_groups=2), V, "of 2 experts hold only"),
      (dict(num_groups=2, top_groups=3), V, "top_groups = 3"),
      (
        dict(num_groups=2, group_best=9),
        V,
        "group_best = 9, but groups have 4",
      ),
      (dict(forced_idx=zeros(3, 2)), F, "forced_idx is float32"),
      (dict(forced_idx=ids(3, 1)), V, r"forced_idx has shape \(3, 1\).*\(3, 2"),
      (dict(captured_idx=ids(1, 2)), V, r"captured_idx has shape \(1, 2\)"),
      (
        dict(captured_idx=0, forced_idx=0),
        V,
        "got forced_idx and captured_idx",
      ),
    ],
  ),
  "topk_from_map": lambda: (
    dict(routing_map=np.zeros((4, E), bool), probs=zeros(4, E), top_k=K),
    [
      (dict(routing_map=ids(4, E)), F, "routing_map is int32, but bools"),
      (dict(routing_map=None), F, "routing_map = None .*an array is expected"),
      (dict(routing_map=np.True_), V, "routing_map has no axes"),
      (dict(probs=np.zeros((4, E), bool)), F, "probs is bool, but floats"),
      (dict(probs=zeros(3, E)), V, r"probs has shape \(3, 8\), but \(4, 8\)"),
      (dict(top_k=E + 1), V, "top_k = 9, but it must be in 1..num_exp.* = 8"),
      (dict(top_k=2.5), F, "top_k = 2.5 is a float"),
    ],
  ),
  "load_balancing_loss": lambda: (
    dict(logits=zeros(2, 4, E), topk_idx=ids(2, 4, K)),
    [
      (dict(logits=None), F, "logits = None .*an array is expected"),
      (dict(logits=ids(2, 4, E)), F, "logits is int32, but floats"),
      (dict(topk_idx=ids(2, 3, K)), V, r"topk_idx has shape \(2, 3, 3\)"),
      (dict(score="relu"), V, "load_balancing_loss: score = 'relu'"),
      (dict(mask=np.ones(2, bool)), V, r"mask has shape \(2,\)"),
    ],
  ),
  "sequence_balancing_loss": lambda: (
    dict(logits=zeros(2, 4, E), topk_idx=ids(2, 4, K)),
    [
      (dict(logits=None), F, "logits = None .*an array is expected"),
      (dict(logits=zeros(E), topk_idx=ids(K)), V, r"logits have shape \(8,\)"),
      (dict(topk_idx=ids(2, 3, K)), V, r"topk_idx has shape \(2, 3, 3\)"),
      (dict(score="relu"), V, "sequence_balancing_loss: score = 'relu'"),
      (dict(mask=zeros(2, 4)), F, "mask is float32, but bools are"),
    ],
  ),
  "router_z_loss": lambda: (
    dict(logits=zeros(2, E)),
    [
      (dict(logits=None), F, "router_z_loss: logits = None .*an array"),
      (dict(logits=ids(2, E)), F, "router_z_loss: logits is int32, but"),
      (dict(mask=zeros(2)), F, "router_z_loss: mask is float32"),
    ],
  ),
  "Placement": lambda: (
    {},
    [
      (dict(experts=[0, 2]), V, "ep.Placement: experts have shape"),
      (dict(experts=[[0, 1], [1, 1]]), V, "ep.Placement: experts have shape"),
      (dict(experts=[0.5, 1.5]), F, "float64, but integers are expected"),
      (dict(experts=jnp.int32(0)), V, r"experts have shape \(\), but they"),
    ],
  ),
  "place": lambda: (
    dict(loads=np.ones(8), num_ranks=8),
    [
      (dict(loads=np.ones((1, 2, 2, 8))), V, r"\(1, 2, 2, 8\), but \[E\]"),
      (dict(loads=np.eye(2, 8)[:1] * 0), V, "not all zero"),
      (dict(loads=-np.ones(8)), V, "none negative"),
      (dict(loads=np.full(8, NAN)), V, "all finite"),
      (dict(loads=["many"] * 8), V, "numbers are expected"),
      (dict(num_ranks=8.0), F, "ep.place: num_ranks = 8.0 .* an integer"),
      (dict(nodes=3), V, "num_ranks = 8 and nodes = 3, but"),
      (dict(nodes=0), V, "nodes = 0, but they must be positive"),
      (dict(old=range(8)), F, "ep.place: old is a range, but the type"),
      (dict(old=ep.Placement(range(4))), V, r"old has slots \(4,\)"),
      (
        dict(loads=np.ones((2, 1, 8)), old=ep.Placement(range(8))),
        V,
        r"must be \[2, 8\]",
      ),
      (dict(move_cost=-1), V, "must not be negative"),
      (dict(move_cost=math.inf), V, "a finite number"),
    ],
  ),
  "describe": lambda: (
    {},
    [
      (dict(handle=layer()), F, "describe: handle is a EpLayerConfig.*EpHandle")
    ],
  ),
  "check": lambda: (
    {},
    [(dict(result=layer()), F, "check: result = EpLayerConfig.*Metrics")],
  ),
  "checked": lambda: (
    {},
    [(dict(enabled="no"), F, "enabled = 'no'.*True or False")],
  ),
  "watch": lambda: (
    {},
    [
      (dict(stall_s=0), V, "stall_s = 0, but it must be a positive number"),
      (dict(exit_after_s=-1.0), V, "exit_after_s = -1.0, but it must be a pos"),
    ],
  ),
  "assert_no_hidden_collectives": lambda: (
    dict(compiled=jax.jit(jnp.sin).lower(1.0).compile()),
    [
      (dict(compiled=jax.jit(jnp.sin)), F, r"compiled.*\.lower\(.*\.compile"),
      (dict(allow="psum"), F, "allow = 'psum' is a str"),
    ],
  ),
  "assert_ordered_collectives": lambda: (
    {},
    [(dict(compiled=jnp.sin), F, r"compiled.*\.lower\(.*\.compile")],
  ),
  "keep_routing": lambda: (
    {},
    [(dict(x="idx"), F, "'str'> is not a valid JAX type")],
  ),
  "ordered_psum": lambda: (
    dict(x=zeros(2)),
    [(dict(axis_name="dp"), NameError, "unbound axis name: dp")],
  ),
  "moe.init": lambda: (
    dict(key=jax.random.key(0), config=ep.MoEConfig(**PLAIN)),
    [
      (dict(key=0), F, "invalid PRNG key"),
      (dict(config=PLAIN), F, "ep.moe.init: config is a dict"),
      (dict(dtype="int8"), F, "ep.moe.init: dtype = "),
    ],
  ),
  "moe.partition_specs": lambda: (
    dict(config=ep.MoEConfig(**PLAIN)),
    [
      (dict(config=PLAIN), F, "partition_specs: config is a dict"),
      (dict(axis_name=3), F, "partition_specs: axis_name = 3"),
      (dict(lead=-1), V, "partition_specs: lead = -1"),
    ],
  ),
  "moe.with_slots": lambda: (
    dict(arrays=zeros(7, 2), specs=PartitionSpec("ep"), num_slots=E),
    [
      (dict(arrays=7), V, r"with_slots: an array of shape \(\) has the spec"),
      (dict(specs=PartitionSpec(None, None, "ep")), V, "with_slots: an array"),
      (dict(num_slots=0), V, "with_slots: num_slots = 0"),
      (dict(axis_name=3), F, "with_slots: axis_name = 3"),
    ],
  ),
  "moe.move": lambda: (
    dict(
      group=group(),
      arrays={"w": zeros(E, 2)},
      specs=PartitionSpec("ep"),
      old=None,
      new=ep.Placement(range(E)),
    ),
    [
      (dict(group=None), F, "move: group is a NoneType"),
      (dict(arrays={"w": zeros(7, 2)}), V, r"arrays\['w'\] of shape \(7, 2\)"),
      (dict(specs=PartitionSpec(None, "ep")), V, r"\(8, 2\): has not 8"),
      (dict(specs=BOTH), V, r"is split by \('dp', 'ep'\), but"),
      (dict(old=[0, 1]), F, "old is a list, but the type Placement"),
      (dict(new=ep.Placement(range(E + 1))), V, r"new has slots \(9,\), but"),
      (
        dict(new=ep.Placement([range(E)] * 3)),
        V,
        r"a placement is of layers \(3,\), but .* \(\)",
      ),
    ],
  ),
  "quant.quantize": lambda: (
    dict(x=zeros(2, 128), format="mxfp8"),
    [
      (dict(x=zeros(2, 33)), V, "multiple of 32"),
      (dict(x=zeros(2, 0)), V, "0 elements"),
      (dict(x=ids(2, 128)), F, "int32"),
      (dict(format="fp8"), V, "'fp8'.*mxfp8"),
    ],
  ),
  "quant.dequantize": lambda: (
    dict(
      rows=zeros(2, 128, dtype=jnp.float8_e4m3fn),
      scales=zeros(2, 4),
      dtype="float32",
    ),
    [
      (dict(rows=zeros(2, 128)), F, "rows is float32"),
      (dict(scales=ids(2, 4)), F, "int32"),
      (dict(scales=zeros(1, 4)), V, r"\[..., S\]"),
      (dict(scales=zeros(2, 3)), V, "divide"),
      (dict(dtype="half precision"), F, "half precision"),
    ],
  ),
  "lax.ragged_all_to_all": lambda: (
    dict(
      operand=zeros(3, H),
      output=zeros(3, H),
      axis_name="ep",
      **dict.fromkeys(SLICES, ids(4) * 0),
    ),
    [
      (dict(operand=jax.random.split(KEY), output=KEY), F, "random.key_data"),
      (dict(output=zeros(3, H + 1)), V, "rows of one shape"),
      (dict(output=ids(3, H)), F, "output of int32"),
      (dict(input_offsets=ids(3)), V, "input_offsets"),
      (dict(send_sizes=ids(8)), V, r"send_sizes is \[8\]"),
      (dict(output_offsets=ids(3)), V, "output_offsets"),
      (dict(recv_sizes=zeros(4)), F, "recv_sizes is float32"),
      (dict.fromkeys(SLICES, ids(6)), V, "multiple of the 4 ranks"),
      (dict(axis_name=()), V, "axis_name is empty"),
      (dict(axis_name="expert"), NameError, "unbound axis name: expert"),
      (dict(axis_index_groups=[[0, 1], [1, 2]]), V, "axis_index_groups"),
    ],
  ),
  "launch.launch": lambda: (
    dict(argv=["true"], num_processes=1),
    [
      (dict(argv="true"), F, "ep.launch: argv = 'true' is a str"),
      (dict(num_processes=0), V, "ep.launch.*num_processes = 0"),
      (dict(devices_per_process=0), V, "devices_per_process = 0"),
      (dict(ranks_per_gpu=0), V, "ranks_per_gpu = 0"),
      (dict(log_dir="/proc/nope"), V, "log_dir = '/proc/n.*another"),
      (dict(timeout_s=-1), V, "timeout_s = -1"),
      (dict(grace_s=NAN), V, "grace_s = nan"),
      (dict(env={"A": 1}), F, r"env\['A'\] = 1 is a int"),
    ],
  ),
  "launch.initialize": lambda: ({}, [(dict(exit_at_once=1), F, "once = 1")]),
  "presets.scaled": lambda: (
    dict(cfg=ep.presets.MIXTRAL_8X7B, divisor=2),
    [
      (dict(cfg=PLAIN), F, "scaled: cfg is a dict"),
      (dict(divisor=7), V, "7 does not divide hidden = 4096"),
      (dict(divisor=0), V, "0 does not divide"),
      (dict(divisor=2.0), F, "divisor = 2.0"),
    ],
  ),
}

# Arguments that have no wrong value, or whose error is of another library.
ANY = {
  "EpHandle": "made by ep_prepare",
  "EpGroup": "made by ep_bootstrap",
  "RoutingSummary": "made by describe",
  "moe.Metrics": "made by MoE",
  "moe.Segments": "made by moe_layer",
  "moe.State": "holds any array; MoE and State.after check it",
  "EpError": "a tuple",
  "launch.inside_launcher": "no argument",
  "lax.install": "no argument",
  "axis_name": "lax.psum refuses it",
  "psum": "a function",
  "ordered_psum.x": "an array",
  "MoE.options": "of ep_bootstrap",
  "MoE.__call__.self": "",
  "MoE.__call__.key": "jax.random refuses it",
  "ep_resize.sizes": "of ep_bootstrap",
}

# Calls of functions that need a context.
FUNCTIONS = {"MoE.__call__": moe, "lax.ragged_all_to_all": ragged}


@pytest.mark.parametrize("name", TABLE)
def test_refuses(name):
  good, rows = TABLE[name]()
  fn = FUNCTIONS.get(name) or operator.attrgetter(name)(ep)
  wrong = []
  for change, error, words in rows:
    try:
      fn(**(good | change))
    except error as e:
      if not re.search(words, str(e)):
        wrong.append(f"{words!r} is not in: {e}")
    except Exception as e:
      wrong.append(f"no {error.__name__} with {words!r}, but {e!r}")
    else:
      wrong.append(f"no error with {words!r}")
  assert not wrong, "\n".join(wrong)


def public():
  """Returns the names of the public functions and classes."""
  names = [n for n in ep.__all__ if callable(getattr(ep, n))] + ["MoE.__call__"]
  for module in "moe", "lax", "quant", "launch", "presets":
    inside = getattr(ep, module)
    functions = (n for n in inside.__all__ if callable(getattr(inside, n)))
    names += (f"{module}.{n}" for n in functions)
  return names


@pytest.mark.parametrize("name", public())
def test_each_argument_has_a_row(name):
  if name in ANY:
    return
  _, rows = TABLE[name]()
  refused = {argument for change, *_ in rows for argument in change}
  fn = operator.attrgetter(name)(ep)
  missing = {
    argument
    for argument in inspect.signature(fn).parameters
    if not {argument, f"{name}.{argument}"} & ANY.keys()
  } - refused
  assert not missing
