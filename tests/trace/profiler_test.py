# SPDX-License-Identifier: Apache-2.0
"""A profiler shows each exchange as a span."""

import gzip
import json
import re

import jax

from cases import Case
import ep
from groups import layer, not_with_xla
from op_functions import Ops


def span_names(folder):
  """Returns the span names of a trace, without their numeric suffixes."""
  (path,) = folder.glob("plugins/profile/*/*.trace.json.gz")
  events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
  return [re.sub(r"\.\d+$", "", e.get("name", "")) for e in events]


@not_with_xla("a span is a collective of XLA's")
def test_spans_name_the_op_and_the_layer(tmp_path):
  config = layer(name="moe_3")
  case = Case(config)

  @jax.jit
  def step(topk_idx, tokens, weights):
    def round_trip(tokens):
      ops = Ops(ep.ep_prepare(config, topk_idx))
      recv, recv_weights = ops.dispatch(tokens, weights)
      return ops.combine(recv, recv_weights)

    out, vjp = jax.vjp(round_trip, tokens)
    return vjp(out)

  args = [case.put(x) for x in (case.topk_idx, case.tokens(), case.weights())]
  jax.block_until_ready(step(*args))
  with jax.profiler.trace(tmp_path):
    jax.block_until_ready(step(*args))
  names = span_names(tmp_path)
  devices = jax.local_device_count()
  for op in "prepare", "dispatch", "combine", "dispatch_bwd", "combine_bwd":
    assert names.count(f"ep_{op}_moe_3_") == devices
