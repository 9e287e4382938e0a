# SPDX-License-Identifier: Apache-2.0
"""Tests the files that ep.trace writes, and the spans of a profiler.

explain_test.py tests reading the files.
"""

import collections
import functools
import gzip
import json
import re
import time

import jax
from jax.experimental import multihost_utils
import numpy as np
import pytest

from cases import Case
from conftest import make_mesh
import ep
from ep._src.backends.xla import stamps
from ep._src.base import contexts
from groups import (
  BACKEND,
  bootstrap,
  layer,
  not_with_xla,
  of_one_process,
  spec,
)
from op_functions import after, Ops
import programs


@functools.cache
def step_of(config):
  """Returns a program whose rank `slow`, if any, arrives late at combine."""

  def nap(rank, slow):
    if int(rank) == int(slow):  # JAX's == would be a program of the mesh
      time.sleep(0.1)

  late = jax.shard_map(
    functools.partial(after, nap),
    in_specs=(spec(config), jax.sharding.PartitionSpec()),
    out_specs=spec(config),
    check_vma=False,
  )

  @jax.jit
  def step(topk_idx, tokens, weights, slow):
    ops = Ops(ep.ep_prepare(config, topk_idx))
    recv, recv_weights = ops.dispatch(tokens, weights)
    return ops.combine(late(recv, slow), recv_weights)

  return step


def run(config, slow=-1, num_steps=6):
  case = Case(config)
  args = [case.put(x) for x in (case.topk_idx, case.tokens(), case.weights())]
  with jax.set_mesh(config.group.mesh):
    for _ in range(num_steps):
      jax.block_until_ready(step_of(config)(*args, np.int32(slow)))


def test_the_late_rank_is_blamed(folder):
  path = folder / "steps.json.gz"
  config = layer(name="moe_3")
  before = config.group.waited()
  with ep.trace(config.group, path):
    run(config, slow=2)
  # In each of 6 steps, all ranks except one wait for 0.1 s.
  mine = {d.id for d in jax.local_devices()}
  late = config.group.mesh.devices.flat[2].id in mine
  expected = 0.6 * (len(mine) - late) / len(mine)
  if BACKEND != "xla":
    assert config.group.waited() - before > 0.5 * expected
  (first, *_) = ep.explain(path).blames
  assert (first.rank, first.layer, first.op) == (2, "moe_3", "ep_combine")
  assert first.share == 1
  assert 0.08 < first.late_s < 0.5
  events = ep._tools.trace.trace.load(path)["exchanges"]
  assert [e["op"] for e in events].count("ep_combine") == 6
  if BACKEND != "xla":
    assert all(min(e["rows"]) >= 0 for e in events)


def test_perfetto_binds_slices_and_arrows(folder):
  """Slices of a track nest, and arrows lead from the last rank to the others.

  Implements the rules of Perfetto's json_trace_parser_impl.cc, slice_tracker.cc
  and flow_tracker.cc: the end of an arrow binds to the slice that began last.
  """
  path = folder / "steps.json.gz"
  config = layer("dp2_ep2", name="moe_3")
  with ep.trace(config.group, path):
    run(config, slow=1)
  content = json.loads(gzip.decompress(path.read_bytes()))
  open_slices = collections.defaultdict(list)  # track -> [(end, name, begin)]
  names, begun, now = {}, {}, 0
  arrows = collections.Counter()
  for e in content["traceEvents"]:
    track = e["pid"], e["tid"]
    stack = open_slices[track]
    ns = round(1e3 * e["ts"])
    assert ns >= now
    now = ns
    if e["ph"] == "M":
      names[e["name"], track] = e["args"]["name"]
    if e["ph"] == "X":
      end = ns + round(1e3 * e["dur"])
      while stack and stack[-1][0] <= ns:
        stack.pop()
      assert end >= ns
      assert not stack or end <= stack[-1][0]
      stack.append((end, e["name"], ns))
    if e["ph"] == "s":
      assert e["id"] not in begun
      begun[e["id"]] = track, stack[-1]
    if e["ph"] == "f":
      source, (_, name, begin) = begun.pop(e["id"])
      assert stack[-1][1] == name
      assert name.startswith("moving: ep_")
      assert stack[-1][2] >= begin
      assert (e["bp"], source[0]) == ("e", track[0])
      arrows[track[0], source[1] % 2, track[1] % 2] += 1
  assert not begun
  for (kind, (domain, tid)), name in names.items():
    assert domain == tid // 2 % 2
    is_rank = kind == "thread_name"
    assert name == (f"rank {tid % 2}" if is_rank else f"domain {domain}")
  assert open_slices.keys() <= {track for _, track in names}
  lasts = (
    (e["domain"], np.argmax(e["came"])) for e in content["ep"]["exchanges"]
  )
  assert arrows == collections.Counter((d, r, 1 - r) for d, r in lasts)


@pytest.mark.skipif(BACKEND != "xla", reason="C++ keeps the exchanges")
def test_a_trace_keeps_no_more_than_it_states(folder, monkeypatch):
  monkeypatch.setattr(stamps, "_KEPT", 4)
  path = folder / "steps.json"
  group = layer().group
  with contexts.in_trace(True), ep.trace(group, path):
    run(layer())
    assert len(group.connection._stamps._ends) <= 4
  content = json.loads(path.read_text())["ep"]
  assert len(content["exchanges"]) == 4
  assert content["lost"] > 0


@of_one_process
def test_a_variable_traces_each_group_to_its_end(folder, monkeypatch):
  folder = folder / "new"
  monkeypatch.setenv("EP_TRACE", str(folder))
  for name, num_steps in ("a/b", 6), ("c", 1):
    with (
      contexts.in_trace(True),  # As if `import ep` saw EP_TRACE.
      bootstrap(make_mesh({"ep": 4}), name=name) as group,
    ):
      run(ep.EpLayerConfig(group, name="moe_3"), 1, num_steps)
      with pytest.raises(RuntimeError, match="is traced already; end"):
        with ep.trace(group, folder / "x"):
          pass
  with pytest.raises(ValueError, match="has 2 traces; name one of them"):
    ep.explain(folder)
  (folder / "d.json.gz").symlink_to(folder / "none")
  code, output = programs.run("-m", "ep", "explain", folder)
  assert code == 1 and "Traceback" not in output
  assert output.count("c.json.gz:\nep.explain: the trace has fewer than") == 1
  assert output.count('rank 1 came late to ep_combine in layer "moe_3"') == 1
  assert "No such file" in output
  left = sorted(x.name for x in folder.iterdir())
  assert left == ["a%2Fb.json.gz", "c.json.gz", "d.json.gz"]


def test_a_variable_must_name_a_folder(folder, monkeypatch):
  monkeypatch.setenv("EP_TRACE", "/dev/null")
  with pytest.raises(ValueError, match="EP_TRACE = '/dev/null': File exist"):
    bootstrap(make_mesh({"ep": 4}))


def test_groups_of_one_name_have_separate_files(folder, monkeypatch):
  """Groups after a resize, and of each process, as if after two restarts."""
  monkeypatch.setenv("EP_TRACE", str(folder))
  with contexts.in_trace(True):
    group = bootstrap(make_mesh({"ep": 4}), name="x/y")
    run(ep.EpLayerConfig(group), num_steps=3)
    with ep.ep_resize(group, max_tokens_per_rank=9) as larger:
      run(ep.EpLayerConfig(larger), num_steps=2)
  own = jax.sharding.Mesh(np.array(jax.local_devices()), "ep")
  monkeypatch.setenv("EP_LAUNCH_RESTART", "2")
  ep.ep_finalize(bootstrap(own, name="x/y"))
  multihost_utils.sync_global_devices("all parts are written")
  if jax.process_index() == 0:
    records = ep._tools.trace.trace
    found = {
      path.name: len(records.load(path)["exchanges"])
      for path in records.files(folder)
    }
    assert found.pop("x%2Fy.json.gz") == 9
    assert found.pop("x%2Fy@2.json.gz") == 6
    assert [*found.values()] == [0] * jax.process_count()
    assert all(name.endswith(".restart_2.json.gz") for name in found)


def test_two_groups_are_not_traced_to_one_path(folder):
  """The second trace fails, and the first one remains complete."""
  path = folder / "steps.json"
  config = layer()
  with bootstrap(make_mesh({"ep": 4})) as other:
    with ep.trace(config.group, path):
      run(config)
      with pytest.raises(RuntimeError, match="is traced to .*steps.json"):
        with ep.trace(other, path):
          pytest.fail("the context has begun")
    assert ep.explain(path).num_steps == 5
    with ep.trace(other, path):
      run(ep.EpLayerConfig(other))
  assert ep.explain(path).num_steps == 5


@pytest.mark.skipif(jax.process_count() == 1, reason="one process")
def test_groups_of_other_processes_are_not_traced_to_one_path(folder):
  """One of two disjoint groups is traced, and the other one raises."""
  own = jax.sharding.Mesh(np.array(jax.local_devices()), "ep")
  path = folder / "steps.json"
  is_first = jax.process_index() == 0

  def trace(config):
    with ep.trace(config.group, path):
      multihost_utils.sync_global_devices("one is traced")
      run(config)
      multihost_utils.sync_global_devices("the others are refused")

  with bootstrap(own) as group:
    config = ep.EpLayerConfig(group)
    if is_first:
      trace(config)
    else:
      multihost_utils.sync_global_devices("one is traced")
      with pytest.raises(RuntimeError, match="of process 0, is traced to"):
        with ep.trace(group, path):
          pytest.fail("the context has begun")
      multihost_utils.sync_global_devices("the others are refused")
    multihost_utils.sync_global_devices("the path is free")
    assert ep.explain(path).num_steps == 5
    if jax.process_index() == jax.process_count() - 1:
      with ep.trace(group, path):
        run(config, num_steps=3)
      assert ep.explain(path).num_steps == 2


def test_a_group_that_ends_in_the_block_is_traced(folder):
  path = folder / "steps.json"
  group = bootstrap(make_mesh({"ep": 4}))
  with ep.trace(group, path):
    run(ep.EpLayerConfig(group))
    ep.ep_finalize(group)
  assert ep.explain(path).num_steps == 5


def test_a_process_that_cannot_write_fails_all(folder):
  """Entering `ep.trace` fails on all processes; no op fails later."""
  config = layer()
  is_last = jax.process_index() == jax.process_count() - 1
  mine = folder / ("none/x.json" if is_last else "x.json")
  for path, words in (mine, "No such file"), (folder, "is a folder"):
    with pytest.raises((OSError, ValueError, RuntimeError), match=words):
      with ep.trace(config.group, path):
        pytest.fail("the context has begun")
  with ep.trace(config.group, folder / "x.json"):
    pass


def test_parts_that_an_error_left_are_merged(folder):
  config = layer()
  path = folder / "steps.json"
  with pytest.raises(KeyError):
    with ep.trace(config.group, path):
      run(config)
      raise KeyError
  multihost_utils.sync_global_devices("all parts are written")
  if jax.process_index() == 0:
    assert ep.explain(path).num_steps == 5
    assert [x.name for x in folder.iterdir()] == ["steps.json"]


def test_a_file_is_read_while_the_next_trace_of_it_begins(folder):
  path = folder / "steps.json.gz"
  with ep.trace(layer().group, path):
    run(layer())
  if jax.process_index() == 0:
    path.with_name(f"{path.name}.part1").write_text("")
    assert ep.explain(path).num_steps == 5


def test_a_variable_changes_programs_of_xla_alone():
  config = layer()
  idx = Case(config).put(Case(config).topk_idx)

  def calls():
    program = jax.jit(lambda idx: ep.ep_prepare(config, idx))
    return program.lower(idx).as_text().count("callback")

  before = calls()
  with contexts.in_trace(True):
    assert calls() - before == (2 if BACKEND == "xla" else 0)
  assert calls() == before


def test_a_group_without_a_trace_says_so(tmp_path):
  mesh = jax.sharding.AbstractMesh((4,), ("ep",))
  with pytest.raises(ValueError, match="has no trace, because its mesh"):
    with ep.trace(bootstrap(mesh, backend=None), tmp_path):
      pass


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
