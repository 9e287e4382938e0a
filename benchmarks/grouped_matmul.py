# SPDX-License-Identifier: Apache-2.0
"""Measures `ep.grouped_matmul` against a dense matmul of the same rows.

    taskset -c 0 ./bazelw run //benchmarks:grouped_matmul

Each program computes a product and its gradients. Runs of the grouped matmul
alternate with runs of a dense matmul, of all rows with one matrix. "bytes" is
the dense time plus the time of NumPy copies: each matrix twice into a cached
buffer, and the buffer into a new array per gradient. A grouped matmul below
"bytes" reads and computes at the same time.

    JAX_PLATFORMS=cuda ... --models=mixtral_8x7b,olmoe_1b_7b

measures the first matmul of models in bfloat16 against others' functions, as
far as they are installed. Prints forward and gradient times, after the errors
of both, relative to the largest value of a loop over the experts. Several
launches follow one another without a wait of the host, whose time is not small
beside a product of 0.2 ms. With --layers, measures whole layers on one device
against the dense products of as many rows.
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

from benchmarks import driver, timing
import ep
from ep import presets

_ROWS, _INNER, _OUTER = 4096, 256, 512
_LAUNCHES = 10  # timed together, of a model's products
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
  print(f"jax {jax.__version__}, medians of {driver.ROUNDS.value}")
  measure_one = measure_layer if _LAYERS.value else measure_model
  for model in _MODELS.value:
    cfg = presets.scaled(presets.BY_NAME[model], _SCALE.value)
    tokens = _TOKENS.value
    print(
      f"E {cfg.num_experts}, K {cfg.top_k}, {cfg.hidden}x{cfg.inner}, {tokens}"
      " tokens"
    )
    measure_one(cfg, tokens, driver.ROUNDS.value)
  if _MODELS.value:
    return
  for dtype in ("float32", "bfloat16"):
    for experts in map(int, _EXPERTS.value):
      measure_experts(dtype, experts, driver.ROUNDS.value)


def measure_experts(dtype: str, experts: int, rounds: int) -> None:
  """Prints the times for `experts` matrices, as multiples of one matmul."""
  rng = np.random.default_rng(0)

  def draw(*shape):
    return jnp.asarray(rng.normal(size=shape), dtype)

  rows, ct = draw(_ROWS, _INNER), draw(_ROWS, _OUTER)
  matrices = draw(experts, _INNER, _OUTER)
  sizes = rng.multinomial(_ROWS, [1 / experts] * experts).astype(np.int32)

  def grouped(rows, matrices):
    return ep.grouped_matmul(rows, matrices, jnp.asarray(sizes))

  def copy(matrices):
    cached = np.empty_like(matrices[0])
    for matrix in itertools.chain(matrices, matrices):
      np.copyto(cached, matrix)
    return [cached.copy() for _ in matrices]

  def run(fn, *args):
    def both(rows, matrices, ct):
      out, vjp = jax.vjp(fn, rows, matrices)
      return out, vjp(ct)

    program = jax.jit(both).lower(*args).compile()
    return lambda: jax.block_until_ready(program(*args))

  seconds = timing.take_turns(
    {
      "dense": run(jnp.matmul, rows, matrices[0], ct),
      "copy": functools.partial(copy, np.asarray(matrices)),
      "grouped": run(grouped, rows, matrices, ct),
    },
    rounds,
  )
  dense = seconds["dense"]
  print(
    f"{dtype}, E = {experts}: dense {np.median(dense) * 1e3:.1f} ms, bytes"
    f" {1 + timing.ratio(seconds['copy'], dense):.2f} x, grouped"
    f" {timing.ratio(seconds['grouped'], dense):.2f} x"
  )


def measure_model(cfg: ep.MoEConfig, tokens: int, rounds: int) -> None:
  """Prints the errors and the milliseconds of each contender."""
  num_rows, experts = tokens * cfg.top_k, cfg.num_experts
  rng = np.random.default_rng(0)
  sizes = rng.multinomial(num_rows, [1 / experts] * experts)

  def draw(*shape):
    return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)

  rows, matrices = (
    draw(num_rows, cfg.hidden),
    draw(experts, cfg.hidden, cfg.inner),
  )
  matrices *= jnp.bfloat16(0.02)
  args = rows, matrices, jnp.asarray(sizes, jnp.int32)

  def gradients(fn):
    def both(rows, matrices, sizes):
      out, vjp = jax.vjp(lambda *x: fn(*x, sizes), rows, matrices)
      return out, *vjp(out)

    return both

  @jax.jit
  def looped(rows, matrices, sizes):
    ends = jnp.cumsum(sizes)
    of_row = jnp.searchsorted(ends, jnp.arange(num_rows), side="right")

    def add(out, e):
      mine = jnp.where((of_row == e)[:, None], rows, 0)
      return out + jnp.matmul(
        mine, matrices[e], preferred_element_type=jnp.float32
      ), None

    zeros = jnp.zeros((num_rows, cfg.inner), jnp.float32)
    out, _ = jax.lax.scan(add, zeros, jnp.arange(experts))
    return out.astype(jnp.bfloat16)

  def error(found, want):
    found, want = (jnp.asarray(x, jnp.float32) for x in (found, want))
    return float(jnp.abs(found - want).max() / jnp.abs(want).max())

  want = jax.jit(gradients(looped))(*args)
  forward, both = {}, {}
  for name, fn in _contenders():
    try:
      programs = jax.jit(fn), jax.jit(gradients(fn))
      found = programs[1](*args)
      if name != "dense":
        errors = [error(*pair) for pair in zip(found, want, strict=True)]
        print(f"{name}: errors {' '.join(f'{x:.1e}' for x in errors)}")
    except Exception as e:  # others' functions refuse shapes in any way
      print(f"without {name}: {type(e).__name__}: {e}".partition("\n")[0])
      continue
    for runs, program in zip((forward, both), programs, strict=True):
      runs[name] = functools.partial(_launches, program, args)
  if torch := _torch(args):
    forward["torch._grouped_mm"] = torch
  flops = 2 * num_rows * cfg.hidden * cfg.inner
  print_times("forward", forward, flops, rounds)
  print_times("with gradients", both, 3 * flops, rounds)


def print_times(what: str, runs: dict, flops: int, rounds: int) -> None:
  for name, seconds in timing.take_turns(runs, rounds).items():
    ms = 1e3 * np.median(seconds) / _LAUNCHES
    print(f"{name}, {what}: {ms:.3f} ms, {flops / ms / 1e9:.0f} TFLOP/s")


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

    def gradients(fn):
      def both(*args):
        out, vjp = jax.vjp(fn, *args)
        return vjp(out)

      return both

    params = ep.moe.init(jax.random.key(0), cfg, jnp.bfloat16)
    matrices = {k: w[0] for k, w in params.items() if k.startswith("w_")}
    rows = jax.random.normal(jax.random.key(1), (num_rows, cfg.hidden))
    rows = rows.astype(jnp.bfloat16)
    flops = 6 * num_rows * cfg.hidden * cfg.inner
    fns = {
      "dense": (dense, (matrices, rows)),
      "ep": (lambda *args: layer(*args)[0], (params, rows[:tokens])),
    }
    forward, both = {}, {}
    for name, (fn, args) in fns.items():
      forward[name] = functools.partial(_launches, jax.jit(fn), args)
      both[name] = functools.partial(_launches, jax.jit(gradients(fn)), args)
    print_times("forward", forward, flops, rounds)
    print_times("with gradients", both, 3 * flops, rounds)


def _launches(fn: Callable, args: Sequence) -> object:
  for _ in range(_LAUNCHES):
    out = fn(*args)
  return jax.block_until_ready(out)


def _contenders() -> Iterator[tuple[str, Callable]]:
  """Yields functions of (rows, matrices, sizes); the first one is dense."""
  yield "dense", lambda rows, matrices, sizes: rows @ matrices[0]
  yield "ep", ep.grouped_matmul
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
    "tokamax",
    lambda *args: importlib.import_module("tokamax").ragged_dot(*args),
  )


def _torch(args) -> Callable[[], object] | None:
  """Returns a run of PyTorch's grouped matmul, or None without a GPU."""
  if jax.default_backend() != "gpu":
    return None
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
  app.run(driver.make_main(measure, worlds))
