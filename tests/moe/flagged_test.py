# SPDX-License-Identifier: Apache-2.0
"""With `errors="flag"`, programs return faults, and `ep.check` raises them.

The sentences equal the errors of `errors="raise"`, in both process layouts.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import Case
import ep
from groups import E, group, H, K, layer, of_one_process, T
from layer_steps import draw_params, put
import programs

R = 4  # ranks
PLAIN = ep.MoEConfig(H, 6, E, K, gated=False, activation=jax.nn.gelu)
SWAPPED = ep.Placement(np.arange(E)[::-1])


def ops_layer(errors="flag", mesh="ep4", **options):
  shared = group(mesh, backend="xla", errors=errors)
  return ep.EpLayerConfig(shared, name="moe_3", **options)


def one_expert(layer):
  return Case(layer, "to_one_expert")


def wrong_id(value):
  def make(layer):
    case = Case(layer)
    case.topk_idx[2 * T + 3, 1] = value
    return case

  return make


def repeated(layer):
  case = Case(layer)
  case.topk_idx[-1] = [-1, 5, 5]
  return case


FAULTS = {
  "out_of_range": (wrong_id(E), {}, "rank 2: topk_idx[3, 1] = 8, but num_e"),
  "negative": (wrong_id(-2), {}, "rank 2: topk_idx[3, 1] = -2, but num_e"),
  "repeated": (repeated, {}, "rank 3: topk_idx[4, 2] = 5 repeats an expert"),
  "too_many_rows": (
    one_expert,
    dict(recv_capacity_per_rank=8),
    "needs 20 receive rows, but the capacity is 8; raise",
  ),
}


def message(fn):
  with pytest.raises(ep.EpError) as error:
    jax.block_until_ready(fn())
  return str(error.value)


def prepare(layer):
  return jax.jit(functools.partial(ep.ep_prepare, layer))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_handle_carries_each_fault(fault):
  make, options, words = FAULTS[fault]
  case = make(ops_layer(**options))
  handle = jax.block_until_ready(prepare(case.layer)(case.put(case.topk_idx)))
  said = message(lambda: ep.check(handle))
  assert said.startswith('ep_prepare(layer "moe_3")') and words in said
  rows, _ = jax.jit(ep.ep_dispatch)(
    handle, case.put(case.tokens()), case.put(case.weights())
  )
  for shard in rows.addressable_shards:
    assert np.isnan(shard.data).all()
  case = make(ops_layer("raise", **options))
  raised = message(lambda: prepare(case.layer)(case.put(case.topk_idx)))
  assert said in raised


def test_a_good_handle_and_a_handle_of_another_backend_pass():
  for good in ops_layer(), ops_layer("raise"), layer():
    case = Case(good)
    ep.check(prepare(good)(case.put(case.topk_idx)))


@pytest.mark.skipif(jax.process_count() == 1, reason="needs two programs")
def test_processes_that_disagree():
  is_last = jax.process_index() == jax.process_count() - 1
  shared = group("ep4", backend="xla", errors="flag")
  odd = ep.EpLayerConfig(shared, name="odd" if is_last else "moe_3")
  case = Case(odd)
  said = message(lambda: ep.check(prepare(odd)(case.put(case.topk_idx))))
  assert "the ranks disagree on a hash of the configuration: " in said


def moe(errors="flag", mesh="ep4", **options):
  config = dataclasses.replace(PLAIN, **options)
  return ep.MoE(config, group(mesh, backend="xla", errors=errors))


def forced(layer, choices=(0, E, 1)):
  """Returns the layer's arguments, with `choices` for token 3 of rank 2."""
  idx = np.tile(np.arange(K, dtype=np.int32), (R * T, 1))
  idx[2 * T + 3] = choices
  x = np.zeros((R * T, H), np.float32)
  return put(layer, draw_params(layer.config, np.zeros), x, idx)


def run(layer, params, x, idx, placement=None):
  return layer(params, x, forced_idx=idx, placement=placement)


@pytest.mark.parametrize(
  "options, placement, words",
  [
    ({}, None, "rank 2: topk_idx[3, 1] = 8, but num_experts = 8"),
    (dict(token_chunks=T), SWAPPED, "rank 2: topk_idx[3, 1] = 8, but"),
    (
      dict(capacity_factor=0.5, overflow="error"),
      None,
      "receive rows, but the capacity is ",
    ),
  ],
  ids=["plain", "chunks", "capacity"],
)
def test_metrics_carry_each_fault(options, placement, words):
  flagged, raising = moe(**options), moe("raise", **options)
  choices = (0, 1, 2) if "capacity_factor" in options else (0, E, 1)
  args = *forced(flagged, choices), placement
  y, metrics = jax.jit(run, static_argnums=0)(flagged, *args)
  said = message(lambda: ep.check(metrics))
  assert said.startswith('ep_prepare(layer "moe")') and words in said
  assert all(np.isnan(s.data).all() for s in y.addressable_shards)
  jitted = jax.jit(run, static_argnums=0)
  assert said in message(lambda: jitted(raising, *args))
  _, metrics = jitted(flagged, *forced(flagged, (0, 2, 1)))
  if "capacity_factor" not in options:
    ep.check(metrics)


@of_one_process
def test_metrics_of_a_scan_carry_the_fault_of_any_layer():
  layer = moe()

  def run(params, x, idx):
    def step(x, is_bad):
      ids = jnp.where(is_bad, idx, jnp.where(idx == E, 3, idx))
      return x, layer(params, x, forced_idx=ids)[1]

    return jax.lax.scan(step, x, jnp.arange(3) == 1)[1]

  stacked = jax.jit(run)(*forced(layer))
  assert stacked.fault.shape == (3, 24)
  said = message(lambda: ep.check(stacked))
  assert "rank 2: topk_idx[3, 1] = 8, but" in said


def test_metrics_carry_the_fault_of_one_domain_to_all():
  layer = moe(mesh="dp2_ep2")
  _, metrics = jax.jit(run, static_argnums=0)(layer, *forced(layer))
  said = message(lambda: ep.check(metrics))
  assert "rank 0: topk_idx[3, 1] = 8, but" in said  # of the second domain


@of_one_process
def test_checked_mode_raises():
  case = wrong_id(E)(ops_layer())
  with ep.checked():
    program = prepare(case.layer)
    assert "= 8, but" in message(lambda: program(case.put(case.topk_idx)))


# Prints whether JAX found the program in its cache, and what it added there.
_CACHED = """
import os, sys
import jax, jax.monitoring, numpy as np
import ep
folder = sys.argv[1]
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_compilation_cache_dir", folder)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
seen = []
jax.monitoring.register_event_listener(lambda name, **_: seen.append(name))
mesh = jax.make_mesh((4,), ("ep",))
config = ep.MoEConfig(8, 4, 8, 2, dtype=np.float32)
layer = ep.MoE(config, mesh, backend="xla", errors="flag", name="moe")
params, x = layer.init(jax.random.key(0)), np.zeros((8, 8), np.float32)
program = jax.jit(layer).lower(params, x)
del seen[:]
before = {*os.listdir(folder)}
program.compile()
added = [n for n in {*os.listdir(folder)} - before if n.endswith("-cache")]
print("/jax/compilation_cache/cache_hits" in seen, len(added))
"""


@of_one_process
def test_the_persistent_cache_keeps_programs_that_flag(tmp_path):
  script = tmp_path / "cached.py"
  script.write_text(_CACHED)
  for expected in "False 1", "True 0":
    code, output = programs.run(script, tmp_path / "cache")
    assert code == 0, output
    assert output.splitlines()[-1] == expected
