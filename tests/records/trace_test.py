# SPDX-License-Identifier: Apache-2.0
"""ep.trace writes what happened, and ep.explain blames whom it must."""

import collections
import contextlib
import gzip
import importlib
import json
import time

import jax
from jax.experimental import multihost_utils
import numpy as np
import pytest

from cases import Case
from conftest import make_mesh
import ep
from ep._src.backends.xla import stamps
from ep._src.base import tracing
from ep._src.records.explain import explain_exchanges
from ep._src.records.trace import merge
from groups import BACKEND, bootstrap, layer, spec
from op_functions import Ops
import programs


def run(config, slow=None, num_steps=6):
  """Runs steps in which the rank `slow` sleeps before it combines."""
  case = Case(config)

  def nap(rank, number):
    if int(rank) == slow:
      time.sleep(0.1)
    return np.asarray(number)

  def sleep(x):  # a callback with more than numbers may wait for its own thread
    number = x.ravel()[0]
    result = jax.ShapeDtypeStruct((), x.dtype)
    rank = jax.lax.axis_index("ep")
    number = jax.pure_callback(nap, result, rank, number)
    return x.at[(0,) * x.ndim].set(number)

  specs = spec(config)
  late = jax.shard_map(sleep, in_specs=specs, out_specs=specs, check_vma=False)

  @jax.jit
  def step(topk_idx, tokens, weights):
    ops = Ops(ep.ep_prepare(config, topk_idx))
    recv, recv_weights = ops.dispatch(tokens, weights)
    return ops.combine(late(recv), recv_weights)

  args = [case.put(x) for x in (case.topk_idx, case.tokens(), case.weights())]
  with jax.set_mesh(config.group.mesh):
    for _ in range(num_steps):
      jax.block_until_ready(step(*args))


def test_the_late_rank_is_blamed(folder):
  path = folder / "steps.json.gz"
  config = layer(name="moe_3")
  before = config.group.waited()
  with ep.trace(config.group, path):
    run(config, slow=2)
  # 6 steps of 0.1 s, for which all ranks but one wait.
  mine = {d.id for d in jax.local_devices()}
  late = config.group.mesh.devices.flat[2].id in mine
  expected = 0.6 * (len(mine) - late) / len(mine)
  if BACKEND != "xla":
    assert config.group.waited() - before > 0.5 * expected
  (first, *_) = ep.explain(path).blames
  assert (first.rank, first.layer, first.op) == (2, "moe_3", "ep_combine")
  assert first.share == 1
  assert 0.08 < first.late_s < 0.5
  events = ep._src.records.trace.load(path)["exchanges"]
  assert [e["op"] for e in events].count("ep_combine") == 6
  assert all(min(e["rows"]) >= 0 for e in events)


def test_perfetto_binds_slices_and_arrows(folder):
  """Slices of a track nest, and arrows lead from the last rank to the others.

  These are the rules of Perfetto's json_trace_parser_impl.cc, slice_tracker.cc
  and flow_tracker.cc: an end of an arrow belongs to the slice that began last.
  """
  path = folder / "steps.json.gz"
  config = layer("dp2_ep2", name="moe_3")
  with ep.trace(config.group, path):
    run(config, slow=1)
  content = json.loads(gzip.decompress(path.read_bytes()))
  open_slices = collections.defaultdict(list)  # of each track: end, name, begin
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


@pytest.mark.skipif(BACKEND != "xla", reason="keeps its exchanges in C++")
def test_a_trace_keeps_no_more_than_it_states(folder, monkeypatch):
  monkeypatch.setattr(stamps, "_KEPT", 4)
  path = folder / "steps.json"
  group = layer().group
  with ep.trace(group, path):
    run(layer())
    assert len(group.connection._stamps._ends) <= 4
  content = json.loads(path.read_text())["ep"]
  assert len(content["exchanges"]) == 4
  assert content["lost"] > 0


def test_a_variable_traces_each_group_to_its_end(folder, monkeypatch):
  folder = folder / "new"
  monkeypatch.setenv("EP_TRACE", str(folder))
  for name in "a/b", "c":
    group = bootstrap(make_mesh({"ep": 4}), name=name)
    with tracing.on(True), group:  # as after an import with the variable
      run(ep.EpLayerConfig(group, name="moe_3"), slow=1)
      with pytest.raises(RuntimeError, match="is traced already; end"):
        with ep.trace(group, folder / "x"):
          pass
  short = bootstrap(make_mesh({"ep": 4}), name="b")
  with tracing.on(True), short:
    run(ep.EpLayerConfig(short), num_steps=1)
  multihost_utils.sync_global_devices("all parts are written")
  if jax.process_index():
    return
  with pytest.raises(ValueError, match="has 3 traces; name one of them"):
    ep.explain(folder)
  code, output = programs.run("-m", "ep.explain", folder)
  assert code == 1
  assert output.count("b.json.gz:\nep.explain: the trace has fewer than") == 1
  assert output.count('rank 1 came late to ep_combine in layer "moe_3"') == 2
  left = sorted(x.name for x in folder.iterdir())
  assert left == ["a%2Fb.json.gz", "b.json.gz", "c.json.gz"]


def test_a_group_that_ends_in_the_block_is_traced(folder):
  path = folder / "steps.json"
  group = bootstrap(make_mesh({"ep": 4}))
  with ep.trace(group, path):
    run(ep.EpLayerConfig(group))
    ep.ep_finalize(group)
  assert ep.explain(path).num_steps == 5


def test_a_part_that_is_missing_is_named(tmp_path):
  with pytest.raises(ValueError, match="has no trace. If it was EP_TRACE"):
    ep.explain(tmp_path)
  head = json.dumps(dict(process=0, ep_size=2, processes=[0, 1])) + "\n"
  for text, missing in (head + '{"lost": 0}\n', 1), (head, 0), ("", 0):
    (tmp_path / "ep0.json.gz.part0").write_text(text)
    with pytest.raises(ValueError, match=f"part{missing} is missing or has no"):
      ep.explain(tmp_path)


def test_a_process_that_cannot_write_fails_all(folder):
  """At once, and not when they wait for it in an op."""
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


def test_a_trace_changes_programs_of_xla_alone():
  config = layer()
  idx = Case(config).put(Case(config).topk_idx)

  def calls():
    program = jax.jit(lambda idx: ep.ep_prepare(config, idx))
    return program.lower(idx).as_text().count("callback")

  before = calls()
  with tracing.on(True):
    assert calls() - before == (2 if BACKEND == "xla" else 0)
  assert calls() == before


def test_a_group_without_a_trace_says_so(tmp_path):
  mesh = jax.sharding.AbstractMesh((4,), ("ep",))
  with pytest.raises(ValueError, match="has no trace, because its mesh"):
    with ep.trace(bootstrap(mesh, backend=None), tmp_path):
      pass


def steps(rng, late=None, rows=(9, 9, 9, 9), num_steps=20):
  """Yields exchanges of 20 ms steps with noise; `late` is (rank, op, s).

  Experts take 1 ms for each row.
  """
  now = 0.0
  for step in range(num_steps):
    for op in "ep_prepare", "ep_dispatch", "ep_combine":
      came = now + 0.005 + rng.exponential(2e-4, len(rows))
      if op == "ep_combine":
        came += np.array(rows) * 1e-3
      if late and op == late[1]:
        came[late[0]] += late[2]
      now = came.max() + 1e-3
      yield dict(
        op=op, layer="a", program="p", domain=0, step=step, rows=list(rows),
        tokens=[[n - n // 3, n // 3] for n in rows],
        came=came.tolist(), began=[came.max()] * len(rows),
        ended=[now] * len(rows),
      )  # fmt: skip


@pytest.mark.parametrize("seed", range(100))
def test_planted_causes_are_found(seed):
  rng = np.random.default_rng(seed)
  assert not explain_exchanges(list(steps(rng))).blames
  rank, op = int(rng.integers(4)), rng.choice(["ep_dispatch", "ep_combine"])
  found = explain_exchanges(list(steps(rng, (rank, op, 0.01))))
  (blame,) = found.blames
  assert (blame.rank, blame.op, blame.balanced_s) == (rank, op, None)
  assert found.step_s - found.punctual_s == pytest.approx(0.01, rel=0.2)
  for most, others in (20, 9), (36, 0):
    rows = np.full(4, others)
    rows[rank] = most
    found = explain_exchanges(list(steps(rng, rows=rows.tolist())))
    (blame,) = found.blames
    assert (blame.rank, blame.op) == (rank, "ep_combine")
    assert blame.balanced_s < 0.5 * blame.late_s
    assert (blame.expert, blame.expert_share > 0.5) == (2 * rank, True)
    assert "times the mean rows" in str(found)


@pytest.mark.parametrize("seed", range(20))
def test_all_late_ranks_are_blamed(seed):
  """So are three of eight, of which none is the last in half of the steps."""
  rng = np.random.default_rng(seed)
  late = rng.choice(8, 3, replace=False).tolist()
  exchanges = list(steps(rng, rows=[9] * 8))
  for e in exchanges[1::3]:
    for rank in late:
      e["came"][rank] += 0.01
  blames = explain_exchanges(exchanges).blames
  assert sorted(b.rank for b in blames) == sorted(late)
  assert {(b.op, b.share) for b in blames} == {("ep_dispatch", 1.0)}


def test_a_long_trace_is_explained():
  late = 2, "ep_dispatch", 0.01
  exchanges = steps(np.random.default_rng(0), late, num_steps=2000)
  (blame,) = explain_exchanges(list(exchanges)).blames
  assert (blame.rank, blame.op) == (2, "ep_dispatch")


def test_the_order_of_independent_ops_does_not_matter():
  rng = np.random.default_rng(0)
  both = []
  for number, e in enumerate(steps(rng, (2, "ep_dispatch", 0.01))):
    other = e | dict(layer="b")
    both += (e, other) if number // 3 % 2 else (other, e)
  blames = explain_exchanges(both).blames
  found = sorted((b.rank, b.layer, b.share) for b in blames)
  assert found == [(2, "a", 1.0), (2, "b", 1.0)]


@pytest.mark.parametrize("every", [3, 30])
def test_some_late_steps_are_no_straggler(every):
  exchanges = list(steps(np.random.default_rng(0), num_steps=30))
  for e in exchanges[4 :: 3 * every]:
    e["came"][1] += 5.0
  assert not explain_exchanges(exchanges).blames


def test_rows_that_are_not_known_are_not_average():
  exchanges = steps(np.random.default_rng(0), (1, "ep_combine", 0.01))
  found = explain_exchanges([e for e in exchanges if e["op"] == "ep_combine"])
  assert "its rows are not known: it computed longer" in str(found)


BAD = {
  "an object": b"{}",
  "a list": b"[]",
  "a number": b"1",
  "no JSON": b"{",
  "no UTF-8": b"\xff",
  "deep JSON": b"[" * 100000,
  "nothing": b"",
  "no gzip": b"\x1f\x8b" + bytes(20),
  "other bytes": gzip.compress(bytes(1000)),
  "a part of a file": gzip.compress(b'{"ep": {}}')[:-9],
  "a wrong sum": gzip.compress(b'{"ep": {}}')[:-8] + bytes(8),
}


@pytest.mark.parametrize("name", BAD)
def test_another_file_is_refused(name, tmp_path):
  path = tmp_path / "steps.json.gz"
  path.write_bytes(BAD[name])
  with pytest.raises(ValueError, match="gz is not a file of ep.trace, or is"):
    ep.explain(path)


def test_any_value_of_a_file_may_be_wrong(tmp_path):
  rng = np.random.default_rng(0)
  failure = dict(
    op="ep_combine", layer="a", step=1, domain=0, at=1.0, failed="it failed",
    ranks=[1], are_absent=True,
  )  # fmt: skip
  bad = None, "x", -1, 10**400, float("nan"), [], {}, [[1]], {"a": 1}
  path = tmp_path / "steps.json"
  for number in range(300):
    whole = dict(ep_size=4, killed=[0], failures=[failure][: number % 2])
    whole |= dict(exchanges=list(steps(rng, num_steps=4)))
    place = content = {"ep": json.loads(json.dumps(whole))}
    key = "ep"
    while isinstance(place[key], list | dict) and place[key]:
      place = place[key]
      keys = list(place) if isinstance(place, dict) else range(len(place))
      key = keys[rng.integers(len(keys))]
      if rng.random() < 0.2:
        break
    if rng.random() < 0.2:
      del place[key]
    else:
      place[key] = bad[rng.integers(len(bad))]
    path.write_text(json.dumps(content))
    with contextlib.suppress(ValueError):
      str(ep.explain(path))


def test_the_program_says_what_is_wrong(tmp_path):
  code, output = programs.run("-m", "ep.explain", tmp_path / "none.json.gz")
  assert (code, "No such file" in output) == (1, True)
  assert "Traceback" not in output


def test_import_of_the_program_keeps_the_function():
  assert importlib.import_module("ep.explain") is ep.explain


def part(process, came, step):
  """Returns what a process of two wrote about a loop, with these arrivals."""
  lines = [dict(process=process, ep_size=2, processes=[0, 1])]
  for times in came:
    end = max(times) + 0.1
    event = dict(
      op="ep_combine", layer="", program="p", site="1", step=step, domain=0,
      began=end, ended=end, came=times, rows=[1, 1], dropped=[0, 0],
      bytes=[1, 1], tokens=[[1], [1]],
    )  # fmt: skip
    lines.append(event)
  lines.append(dict(lost=0))
  return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.mark.parametrize("ahead", [0.0, 7.0, -7.0])
def test_clocks_are_aligned_by_the_exchanges(ahead):
  """Posts are seen 1 ms after they were sent."""
  theirs = [1.001 + ahead, 2.0 + ahead]
  merged = merge([part(0, [[1.0, 2.001]], 0), part(1, [theirs], 0)])
  assert merged["clocks"][1]["bound_s"] == pytest.approx(0.002)
  assert merged["clocks"][1]["offset_s"] == pytest.approx(ahead, abs=0.0011)
  assert merged["exchanges"][0]["came"] == pytest.approx([1, 2], abs=0.0011)


def test_clocks_of_other_speeds_have_a_bound():
  """The second one gains 20 ms in 10 s."""
  ours = [[0.0, 0.001], [10.0, 10.001]]
  theirs = [[5.001, 5.0], [15.021, 15.02]]
  merged = merge([part(0, ours, 0), part(1, theirs, 0)])
  clock = merged["clocks"][1]
  assert clock["bound_s"] == pytest.approx(0.018)
  assert clock["offset_s"] == pytest.approx(5.001)


def test_a_trace_that_begins_within_a_loop_leaves_it_out():
  """One process has an iteration that the other has not."""
  merged = merge([part(0, [[1, 1], [2, 2]], 0), part(1, [[2, 2]], 0)])
  assert merged["exchanges"] == []
  assert merged["clocks"][1] == dict(offset_s=0.0, bound_s=None)
