# SPDX-License-Identifier: Apache-2.0
"""JAX's profiler shows the ops as spans that name the op and the layer."""

import re

import jax

from cases import Case, lower
import ep
from ep._src.base.backend import OPS
from groups import BACKEND, group
from op_functions import round_trip


def forward_and_back(ops, tokens, weights, g):
  out, vjp = jax.vjp(lambda *x: round_trip(ops, *x), tokens, weights)
  return out, vjp(g)


def test_spans_name_the_op_and_the_layer(tmp_path):
  """The name of a span is an instruction, whose path has the op and layer."""
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
