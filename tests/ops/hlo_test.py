# SPDX-License-Identifier: Apache-2.0
"""The compiled program has the exchanges of our ops and no other collective."""

import functools
import re

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np
import pytest

from cases import Case, exchanges, global_view, local_view, lower
from conftest import make_mesh, to_global
import ep
from ep._src.base.backend import OPS
from groups import BACKEND, GPU, group, layer, not_with_xla, spec
from op_functions import round_trip


def forward_and_back(ops, tokens, weights, g):
  out, vjp = jax.vjp(lambda *x: round_trip(ops, *x), tokens, weights)
  return out, vjp(g)


@not_with_xla("a rank by itself exchanges nothing")
@pytest.mark.parametrize(
  "mesh, axis_type, view",
  [
    ("ep4", AxisType.Auto, global_view),
    ("dp2_ep2", AxisType.Explicit, global_view),
    ("dp2_ep2", AxisType.Auto, local_view),
    ("dp4_ep1", AxisType.Explicit, local_view),
  ],
)
def test_forward_and_backward(mesh, axis_type, view):
  """The forward and the backward pass share one exchange of the routing."""
  case = Case(layer(mesh, axis_type))
  inputs = case.tokens(), case.weights(), case.tokens()
  program = lower((case, forward_and_back, *inputs), view=view).compile()
  ep.assert_no_hidden_collectives(program)
  assert exchanges(program) == sorted(OPS)


def other_collectives():
  """Compiles a program of an all-reduce and two all-gathers."""
  mesh = make_mesh({"x": 4})
  x = to_global(np.ones((4, 4), np.float32), mesh, PartitionSpec("x"))

  def fn(x):
    with jax.named_scope("grad_sync"):
      total = jax.shard_map(
        lambda x: jax.lax.psum(x, "x"),
        mesh=mesh,
        in_specs=PartitionSpec("x"),
        out_specs=PartitionSpec(),
      )(x)
    return x * 2, x, total

  shardings = *[NamedSharding(mesh, PartitionSpec())] * 2, None
  return jax.jit(fn, out_shardings=shardings).lower(x).compile()


def assert_hidden(program, *words, allow=()):
  with pytest.raises(AssertionError, match="besides the exchanges") as error:
    ep.assert_no_hidden_collectives(program, allow=allow)
  for word in words:
    assert word in str(error.value)


def test_other_collectives_are_named():
  """The error has the path and line of each collective, or of its cause."""
  program = other_collectives()
  where = "grad_sync", "hlo_test.py:"
  assert_hidden(program, "all-reduce", "all-gather", *where)
  assert_hidden(program.as_text(), "all-gather", *where)
  # Newer partitioners give a collective the path of the op that needed it.
  is_older = jax.__version_info__ < (0, 11)
  made = "made by the partitioner for " if is_older else ""
  for cause in f"{made}jit(fn)/mul, {__file__}:", f"{made}x, no source line":
    assert_hidden(program, "all-gather", cause, allow=["all-reduce"])
  assert_hidden(program, "all-reduce", *where, allow=["all-gather"])
  ep.assert_no_hidden_collectives(program, allow=["all-gather", "grad_sync"])


# XLA prints collectives like this for GPUs and TPUs, and older versions did on
# every platform.
OTHER_SPELLINGS = """HloModule jit_f
  %a.1 = (f32[4]{0:T(8,128)}, f32[16]{0:T(8,128)}) all-gather-start(%p), \
metadata={op_name="jit(f)/x" source_file="f.py" source_line=7}
  %b = f32[16]{0} all-gather-done(%a.1)
  ROOT %c = (f32[2]{0}, /*index=1*/f32[2]{0}) ragged-all-to-all(%b)
  %d = (f32[], u32[], token[]) send(%b, %t), channel_id=3, is_host_transfer=true
  %e = f32[4]{0} custom-call(%b), custom_call_target="all-reduce("
"""


def test_other_spellings():
  first = "all-gather %a.1, jit(f)/x, f.py:7"
  second = "ragged-all-to-all %c, made by the partitioner for jit(f)/x, f.py:7"
  assert_hidden(OTHER_SPELLINGS, f"ep:\n  {first}\n  {second}\nCheck")


def loop_and_sum(last):
  """Compiles a loop of ops and all-reduces, and the sum of `last(results, x)`.

  XLA schedules the sum after the loop, since `last` takes long.
  """
  config = layer("dp2_ep2")

  @functools.partial(
    jax.shard_map,
    mesh=config.group.mesh,
    in_specs=spec(config),
    out_specs=PartitionSpec(None, "ep"),
  )
  def fn(topk_idx, x):
    handle = ep.ep_prepare(config, topk_idx)
    weights = jax.numpy.ones(topk_idx.shape)

    def body(x, _):
      rows, _ = ep.ep_dispatch(handle, x, weights)
      x = ep.ep_combine(handle, rows)
      return x, jax.lax.psum(x, "dp")

    _, sums = jax.lax.scan(body, x, None, 2)
    for _ in range(4):
      x = jax.lax.fori_loop(0, 99, lambda _, x: jax.numpy.sin(x), x[::-1])
    return sums, jax.lax.psum(last(sums, x), "dp")[None]

  case = Case(config)
  args = case.topk_idx, case.tokens()
  args = [to_global(a, config.group.mesh, spec(config)) for a in args]
  return jax.jit(fn).lower(*args).compile()


@not_with_xla("XLA makes and orders all collectives")
def test_a_loop_orders_only_collectives_that_need_its_results():
  ep.assert_ordered_collectives(loop_and_sum(lambda sums, x: x + sums[1]))
  program = loop_and_sum(lambda sums, x: x)
  with pytest.raises(AssertionError, match="all-reduce .* beside while "):
    ep.assert_ordered_collectives(program)
  with pytest.raises(TypeError, match="assert_ordered_collectives: .*compile"):
    ep.assert_ordered_collectives(jax.jit(lambda x: x))


@pytest.mark.skipif(GPU, reason="the profiler needs CUPTI")
def test_spans_name_the_op_and_the_layer(tmp_path):
  """JAX's profiler shows each op as a span that is named like an instruction.

  The path of the instruction has the op and the layer. On a GPU, the profiler
  needs CUPTI.
  """
  case = Case(ep.EpLayerConfig(group("ep4"), name="moe_3"))
  arrays = case.tokens(), case.weights(), case.tokens()
  program = lower((case, forward_and_back, *arrays)).compile()
  args = jax.tree.map(case.put, [case.routing, *arrays])
  with jax.profiler.trace(tmp_path):
    jax.block_until_ready(program(args))
  (file,) = tmp_path.rglob("*.xplane.pb")
  profile = jax.profiler.ProfileData.from_file(str(file))
  spans = {
    event.name
    for plane in profile.planes
    for line in plane.lines
    for event in line.events
  }
  exchange = (
    r'%(\S+) = .* (?:custom-call|all-\S+)\(.*op_name="[^"]*/(ep_\S+?)[/"]'
  )
  found = dict(re.findall(exchange, program.as_text()))
  found = {name: op for name, op in found.items() if name in spans}
  assert {*found.values()} == {f"{op}[moe_3]" for op in OPS}
  if BACKEND != "xla":
    for name, op in found.items():
      assert name.startswith(re.sub(r"\W", "_", op))
  if BACKEND != "xla" and jax.process_count() == 1:
    # The first ranks of an op have its result later than the end of their span.
    assert all(f"end: {name}" in spans for name in found)
