# SPDX-License-Identifier: Apache-2.0
"""Runs a MoE model's forward and backward pass, and checks the results.

    bazel run //examples:ep_moe -- --num_experts=32 --top_k=4

starts the ranks of a (dp, ep) mesh as processes on this host, or joins the
ranks of a launcher. The model has one layer, and predicts each next byte of a
text from one byte. The ranks embed the bytes, route, dispatch, run their
experts, combine, and compute the gradients of the loss. Rank 0 prints the
number of tokens that each rank sent and received, the times of the exchanges,
and the deviations from a dense model.
"""

from collections.abc import Callable
import hashlib
import statistics
import time

from absl import app, flags
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

import dense_reference
import ep
import ranks

_HIDDEN = flags.DEFINE_integer("hidden", 128, "hidden size", 1)
_TOKENS_PER_RANK = flags.DEFINE_integer(
  "tokens_per_rank", 512, "bytes of text on each rank", 1
)
_DTYPE = flags.DEFINE_enum(
  "dtype",
  "float32",
  ["float32", "bfloat16", "float16"],
  "dtype of the parameters",
)
_CHECK = flags.DEFINE_bool("check", True, "compare with a dense reference")

TOKENS = PartitionSpec(ranks.AXES)
EXPERTS = PartitionSpec("ep")
REPLICATED = PartitionSpec()
SHARDING = {
  "embed": REPLICATED,
  "router": REPLICATED,
  "w_gate": EXPERTS,
  "w_up": EXPERTS,
  "w_down": EXPERTS,
  "unembed": REPLICATED,
}

# The largest allowed deviation, relative to an array's largest value.
BOUNDS = {"float32": 2e-5, "bfloat16": 1e-1, "float16": 1e-2}

flags.adopt_module_key_flags(ranks)
flags.set_default(ranks.NUM_EXPERTS, 16)
ranks.require(
  "num_experts ep",
  "num_experts must be a multiple of ep",
  lambda experts, ep: experts % ep == 0,
)


def main(argv) -> int | str:
  return ranks.main(
    argv, __file__, read_text, run_ranks, threads=ranks.num_ranks()
  )


def run_ranks() -> int:
  """Runs the ranks of this process; returns the exit code. Rank 0 reports."""
  # By default, GPUs multiply float32 as TF32, which would hide deviations.
  jax.config.update("jax_default_matmul_precision", "highest")
  tokens = read_text()
  inputs, targets = tokens[:-1], tokens[1:]
  dtype = jnp.dtype(_DTYPE.value)
  params = init_params(ranks.NUM_EXPERTS.value, _HIDDEN.value, dtype)
  results, traffic = run_step(params, inputs, targets)
  if jax.process_index() != 0:
    return 0
  print_traffic(traffic)
  if not _CHECK.value:
    print_results(results)
    return 0
  expected = dense_reference.loss_output_and_grads(
    params, inputs, targets, ranks.TOP_K.value
  )
  deviations = relative_deviations(results, name_results(*expected))
  print_results(results, deviations)
  return verdict(deviations, BOUNDS[_DTYPE.value])


def run_step(params, inputs, targets):
  """Returns a training step's results by name, and each rank's traffic."""
  mesh = ranks.make_mesh()
  params = {
    name: shard(param, mesh, SHARDING[name]) for name, param in params.items()
  }
  inputs, targets = (shard(x, mesh, TOKENS) for x in (inputs, targets))
  with ep.ep_bootstrap(
    mesh,
    num_experts=ranks.NUM_EXPERTS.value,
    max_tokens_per_rank=_TOKENS_PER_RANK.value,
    hidden_dim=_HIDDEN.value,
    top_k=ranks.TOP_K.value,
    max_token_dtype=params["w_up"].dtype,
    backend=ranks.BACKEND.value,
  ) as group:
    layer = ep.EpLayerConfig(group)
    step = make_step(mesh, layer)
    results = fetch(mesh, step(params, inputs, targets))
    return name_results(*results), measure(mesh, layer, params, inputs)


def init_params(
  num_experts: int, hidden: int, dtype: jnp.dtype
) -> dict[str, np.ndarray]:
  """Returns whole parameters, the same on every process."""
  inner = 2 * hidden
  shapes = {
    "embed": (ranks.VOCABULARY, hidden),
    "router": (hidden, num_experts),
    "w_gate": (num_experts, hidden, inner),
    "w_up": (num_experts, hidden, inner),
    "w_down": (num_experts, inner, hidden),
    "unembed": (hidden, ranks.VOCABULARY),
  }
  rng = np.random.default_rng(0)
  params = {}
  for name, shape in shapes.items():
    scale = 1.0 if name == "embed" else shape[-2] ** -0.5
    # A router in float32 chooses the same experts for every dtype.
    params[name] = (scale * rng.standard_normal(shape)).astype(
      np.float32 if name == "router" else dtype
    )
  return params


def embed_and_route(params, layer: ep.EpLayerConfig, inputs):
  """Maps a rank's `[T]` bytes to `[T, H]` tokens and `[T, K]` choices."""
  # The embedding lookup is in float32, because its gradient sums over all
  # tokens of the same byte.
  tokens = params["embed"].astype(jnp.float32)[inputs]
  logits = tokens @ params["router"]
  tokens = tokens.astype(params["embed"].dtype)
  return tokens, *ep.route_topk(logits, layer.top_k)


def loss_and_output(params, layer: ep.EpLayerConfig, inputs, targets):
  """Returns a rank's share of the mean cross-entropy, and outputs `[T, H]`."""
  tokens, topk_idx, topk_weights = embed_and_route(params, layer, inputs)
  output = tokens + ep.moe_layer(
    layer,
    tokens,
    topk_idx,
    topk_weights,
    w_gate=params["w_gate"],
    w_up=params["w_up"],
    w_down=params["w_down"],
  )
  logits = (output @ params["unembed"]).astype(jnp.float32)
  log_probs = jnp.take_along_axis(
    jax.nn.log_softmax(logits), targets[:, None], axis=-1
  )
  return -log_probs.mean() / lax.axis_size(ranks.AXES), output


def make_step(mesh: Mesh, layer: ep.EpLayerConfig) -> Callable:
  """Builds `step(params, inputs, targets) -> loss, output, gradients`.

  Inputs and targets are int32 `[N]`, sharded over all ranks. The loss is the
  mean over all ranks.
  """

  def step(params, inputs, targets):
    (loss, output), grads = jax.value_and_grad(loss_and_output, has_aux=True)(
      params, layer, inputs, targets
    )
    grads = {
      # An expert's gradient is already summed over the EP domain.
      name: ep.ordered_psum(
        grad, "dp" if SHARDING[name] == EXPERTS else ranks.AXES
      )
      for name, grad in grads.items()
    }
    return ep.ordered_psum(loss, ranks.AXES), output, grads

  return jax.jit(
    jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(SHARDING, TOKENS, TOKENS),
      out_specs=(REPLICATED, TOKENS, SHARDING),
      check_vma=False,  # gradients differ between ranks until summed
    )
  )


def read_text() -> np.ndarray:
  """Returns the tokens of all ranks, plus the next byte as last target."""
  count = ranks.num_ranks() * _TOKENS_PER_RANK.value + 1
  return ranks.read_text(count, count)


def shard(array: np.ndarray, mesh, spec: PartitionSpec) -> jax.Array:
  """Makes a global array; every process passes the whole array."""
  return jax.make_array_from_process_local_data(
    NamedSharding(mesh, spec), array, array.shape
  )


def fetch(mesh, tree):
  """Returns global arrays as whole numpy arrays, on every process."""
  replicated = NamedSharding(mesh, PartitionSpec())
  return jax.tree.map(
    np.asarray, jax.jit(lambda x: x, out_shardings=replicated)(tree)
  )


def measure(mesh, layer, params, inputs) -> dict[str, np.ndarray]:
  """Returns ranks' traffic and times of dispatch and combine, each `[R]`."""
  tokens, topk_idx, topk_weights = jax.jit(
    lambda params, inputs: embed_and_route(params, layer, inputs)
  )(params, inputs)
  handle = jax.jit(lambda idx: ep.ep_prepare(layer, idx))(topk_idx)
  dispatch, combine = jax.jit(ep.ep_dispatch), jax.jit(ep.ep_combine)
  rows, row_weights = dispatch(handle, tokens, topk_weights)
  times = [
    median_time(dispatch, handle, tokens, topk_weights),
    median_time(combine, handle, rows, row_weights),
  ]
  times = jax.make_array_from_callback(
    (mesh.size, 2),
    NamedSharding(mesh, TOKENS),
    lambda _: np.array([times], np.float32),  # equal on a process's ranks
  )
  topk_idx, times, handle = fetch(mesh, (topk_idx, times, handle))
  loads = handle.token_counts
  return {
    "sent": (topk_idx >= 0).reshape(mesh.size, -1).sum(axis=1),
    "received": loads.sum(axis=1),
    "dropped": handle.dropped_counts.sum(axis=1),
    "imbalance": loads.max(axis=1) / np.maximum(loads.mean(axis=1), 1e-9),
    "dispatch": times[:, 0],
    "combine": times[:, 1],
  }


def median_time(fn, *args) -> float:
  """Returns the median seconds of 10 runs, after a first run that compiles."""
  times = []
  for _ in range(11):
    start = time.perf_counter()
    jax.block_until_ready(fn(*args))
    times.append(time.perf_counter() - start)
  return statistics.median(times[1:])


def name_results(loss, output, grads) -> dict[str, np.ndarray]:
  return {
    "loss": loss,
    "output": output,
    **{f"grad of {name}": grad for name, grad in grads.items()},
  }


def relative_deviations(actual, expected) -> dict[str, float]:
  """Divides each array's largest deviation by its largest expected value."""

  def deviation(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    largest = np.max(np.abs(want))
    # With top_k = 1, the router's gradient has only rounding errors.
    return float(np.max(np.abs(got - want)) / max(largest, 1e-8))

  return {name: deviation(actual[name], expected[name]) for name in expected}


def print_traffic(traffic: dict[str, np.ndarray]) -> None:
  dp, size = ranks.DP.value, ranks.EP.value
  print(
    f"{dp} x {size} (dp, ep) mesh, processes: {jax.process_count()}, "
    f"{_TOKENS_PER_RANK.value} tokens on each rank\n"
    f"{ranks.NUM_EXPERTS.value} experts, top {ranks.TOP_K.value}, "
    f"hidden size {_HIDDEN.value}, {_DTYPE.value}\n"
  )
  print("(dp, ep)   sent  received  dropped  max/mean   dispatch    combine")
  for rank, row in enumerate(zip(*traffic.values(), strict=True)):
    sent, received, dropped, imbalance, dispatch, combine = row
    print(
      f"{divmod(rank, size)!s:8} {sent:6} {received:9} {dropped:8} "
      f"{imbalance:9.2f} {dispatch * 1e3:7.2f} ms {combine * 1e3:7.2f} ms"
    )
  print("max/mean: tokens of a rank's busiest expert, relative to its mean\n")


def print_results(
  results: dict[str, np.ndarray], deviations: dict[str, float] | None = None
) -> None:
  print(
    "digests: equal for every number of processes and ranks, but not on every"
    " kind of processor\n"
  )
  print(f"{'':16} {'digest':16}" + ("  deviation" if deviations else ""))
  for name, array in results.items():
    end = f"  {deviations[name]:9.1e}" if deviations else ""
    digest = hashlib.sha256(array.tobytes()).hexdigest()[:16]
    shown = f"{array:<16.6f}" if name == "loss" else digest
    print(f"{name:16} {shown}{end}")


def verdict(deviations: dict[str, float], bound: float) -> int:
  """Returns 0 if every deviation is within the bound (NaN is not), else 1."""
  failed = [name for name, d in deviations.items() if not d <= bound]
  result = f"FAILED: {', '.join(failed)}: a" if failed else "OK: no"
  print(
    f"\n{result} value deviates from the dense model's by more than {bound:g}"
    " of the largest."
  )
  return int(bool(failed))


if __name__ == "__main__":
  app.run(main)
