# SPDX-License-Identifier: Apache-2.0
"""Measures `ep.grouped_matmul` against a dense matmul of the same rows.

    taskset -c 0 ./bazelw run //benchmarks:grouped_matmul

The program "dense" multiplies all rows by one matrix. "copies" are the copies
of NumPy that read and write as much as the other matrices: each matrix twice
into a cached buffer, and the buffer into a new array per gradient. A grouped
matmul below dense and copies together reads and computes at the same time.

    JAX_PLATFORMS=cuda ... --models=mixtral_8x7b,olmoe_1b_7b

measures the first matmul of models in bfloat16, also by other implementations
as far as they are installed. With --layers, measures whole layers on one device
against the dense products of as many rows.

Prints the errors of the product and its gradients, relative to the largest
value of a loop over the experts, then times and ratios to dense. Several
launches follow one another without a wait of the host, whose time is not small
beside a product of 0.2 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import functools
import importlib
import itertools

from absl import app, flags
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
import numpy as np

from benchmarks import timing
import ep
from ep import presets

_ROWS, _INNER, _OUTER = 4096, 256, 512
_LAUNCHES = 10  # timed together
_EXPERTS = flags.DEFINE_list(
  "experts", ["8", "64", "256"], "numbers of experts"
)
_MODELS = flags.DEFINE_list(
  "models", [], f"measure models instead, of {', '.join(presets.BY_NAME)}"
)
_LAYERS = flags.DEFINE_bool("layers", False, "measure layers of the models")
_SCALE = flags.DEFINE_integer("model_scale", 1, "divisor of models' widths", 1)
_TOKENS = flags.DEFINE_integer("model_tokens", 4096, "tokens of models", 1)


def measure() -> None:
  rounds, tokens = timing.ROUNDS.value, _TOKENS.value
  print(f"jax {jax.__version__}, medians of {rounds}")
  for model in _MODELS.value:
    cfg = presets.scaled(presets.BY_NAME[model], _SCALE.value)
    if _LAYERS.value:
      print(f"\n{model}, {tokens} tokens")
      measure_layer(cfg, tokens, rounds)
    else:
      sizes = cfg.num_experts, cfg.hidden, cfg.inner
      rows = tokens * cfg.top_k
      measure_products("bfloat16", rows, *sizes, rounds, others=True)
  if not _MODELS.value:
    for dtype in ("float32", "bfloat16"):
      for experts in map(int, _EXPERTS.value):
        measure_products(dtype, _ROWS, experts, _INNER, _OUTER, rounds)


def measure_products(
  dtype: str,
  num_rows: int,
  experts: int,
  inner: int,
  outer: int,
  rounds: int,
  *,
  others: bool = False,
) -> None:
  """Prints the errors and times of products, also of others' functions."""
  print(f"\n{dtype}, {num_rows} rows, E = {experts}, {inner}x{outer}")
  rng = np.random.default_rng(0)
  sizes = rng.multinomial(num_rows, [1 / experts] * experts).astype(np.int32)
  rows = rng.standard_normal((num_rows, inner), np.float32)
  matrices = rng.standard_normal((experts, inner, outer), np.float32)
  rows, matrices = jnp.asarray(rows, dtype), jnp.asarray(matrices / 50, dtype)
  args = rows, matrices, jnp.asarray(sizes)
  want = _looped(np.float32(rows), np.float32(matrices), sizes)

  def error(found, want):
    return abs(np.float32(found) - want).max() / abs(want).max()

  forward, both = {}, {}
  for name, fn in _functions(others):
    try:
      programs = jax.jit(fn), jax.jit(_with_gradients(fn))
      found = programs[1](*args)
      if name != "dense":
        errors = map(error, found, want)
        print(f"{name}: errors {' '.join(f'{x:.1e}' for x in errors)}")
    except Exception as e:  # others' functions refuse shapes in any way
      print(f"without {name}: {type(e).__name__}: {e}".partition("\n")[0])
      continue
    for runs, program in zip((forward, both), programs, strict=True):
      runs[name] = functools.partial(_launches, program, args)
  if jax.default_backend() == "cpu":
    both["copies"] = functools.partial(_launches, _copy, [np.array(matrices)])
  elif others:
    forward["torch._grouped_mm"] = _torch(args)
  flops = 2 * num_rows * inner * outer
  print_times("forward", forward, flops, rounds)
  print_times("with gradients", both, 3 * flops, rounds)


def print_times(what: str, runs: dict, flops: int, rounds: int) -> None:
  times = timing.take_turns(runs, rounds)
  for name, seconds in times.items():
    each = np.median(seconds) / _LAUNCHES
    print(
      f"{name}, {what}: {1e3 * each:.3f} ms, {flops / each / 1e9:.0f} GFLOP/s,"
      f" {timing.ratio(seconds, times['dense']):.2f} x dense"
    )


def measure_layer(cfg: ep.MoEConfig, tokens: int, rounds: int) -> None:
  """Prints the milliseconds of a layer and of its dense products."""
  mesh = jax.make_mesh((1,), ("ep",), (AxisType.Auto,))
  num_rows = tokens * cfg.top_k
  with ep.ep_bootstrap(
    mesh,
    num_experts=cfg.num_experts,
    max_tokens_per_rank=tokens,
    hidden_dim=cfg.hidden,
    top_k=cfg.top_k,
    max_token_dtype=jnp.bfloat16,
  ) as group:
    layer = ep.MoE(cfg, group)

    def dense(params, rows):
      hidden = jax.nn.silu(rows @ params["w_gate"]) * (rows @ params["w_up"])
      return hidden @ params["w_down"]

    params = ep.moe.init(jax.random.key(0), cfg, jnp.bfloat16)
    matrices = {k: w[0] for k, w in params.items() if k.startswith("w_")}
    rows = jax.random.normal(jax.random.key(1), (num_rows, cfg.hidden))
    rows = rows.astype(jnp.bfloat16)
    flops = 6 * num_rows * cfg.hidden * cfg.inner
    fns = {
      "dense": (dense, (matrices, rows)),
      "ep": (lambda *args: layer(*args)[0], (params, rows[:tokens])),
    }
    for what, of, times in (
      ("forward", lambda fn: fn, 1),
      ("with gradients", _with_gradients, 3),
    ):
      runs = {
        name: functools.partial(_launches, jax.jit(of(fn)), args)
        for name, (fn, args) in fns.items()
      }
      print_times(what, runs, times * flops, rounds)


def _with_gradients(fn: Callable) -> Callable:
  """Returns a function that also returns the gradients of two arguments.

  The result is the cotangent.
  """

  def both(a, b, *rest):
    out, vjp = jax.vjp(lambda a, b: fn(a, b, *rest), a, b)
    return out, *vjp(out)

  return both


def _looped(
  rows: np.ndarray, matrices: np.ndarray, sizes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns the product and its gradients, by a loop over the experts."""
  parts = np.split(rows, np.cumsum(sizes)[:-1])
  outs = [part @ m for part, m in zip(parts, matrices, strict=True)]
  of_rows = [out @ m.T for out, m in zip(outs, matrices, strict=True)]
  of_matrices = [x.T @ out for x, out in zip(parts, outs, strict=True)]
  return np.concatenate(outs), np.concatenate(of_rows), np.stack(of_matrices)


def _copy(matrices: np.ndarray) -> list[np.ndarray]:
  cached = np.empty_like(matrices[0])
  for matrix in itertools.chain(matrices, matrices):
    np.copyto(cached, matrix)
  return [cached.copy() for _ in matrices]


def _launches(fn: Callable, args: Sequence) -> object:
  for _ in range(_LAUNCHES):
    out = fn(*args)
  return jax.block_until_ready(out)


def _functions(others: bool) -> Iterator[tuple[str, Callable]]:
  """Yields functions of (rows, matrices, sizes); the first one is dense."""
  yield "dense", lambda rows, matrices, sizes: rows @ matrices[0]
  yield "ep", ep.grouped_matmul
  if not others:
    return
  tiles = functools.partial(ep.grouped_matmul, implementation="tiles")
  yield "ep, tiles", tiles
  yield "lax.ragged_dot", jax.lax.ragged_dot
  if jax.default_backend() == "gpu":
    module = "jax.experimental.pallas.ops.gpu.ragged_dot_mgpu"
    yield (
      "ragged_dot_mgpu",
      lambda rows, matrices, sizes: importlib.import_module(module).ragged_dot(
        rows,
        matrices,
        group_sizes=sizes,
        block_m=128,
        block_n=192,
        block_k=64,
        max_concurrent_steps=4,
        grid_block_n=2,
      ),
    )
  yield (
    "ep, tokamax",
    lambda *args: ep.grouped_matmul(
      *args, implementation=importlib.import_module("tokamax").ragged_dot
    ),
  )


def _torch(args) -> Callable[[], object]:
  """Returns a run of PyTorch's grouped matmul."""
  torch = importlib.import_module("torch")
  *tensors, sizes = map(torch.from_dlpack, args)
  ends = sizes.cumsum(0).to(torch.int32)

  def run():
    out = _launches(functools.partial(torch._grouped_mm, offs=ends), tensors)
    torch.cuda.synchronize()
    return out

  return run


def worlds():
  return [dict(num_processes=1)]


if __name__ == "__main__":
  app.run(timing.make_main(measure, worlds))
