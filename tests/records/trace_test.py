# SPDX-License-Identifier: Apache-2.0
"""ep.trace writes what happened, and ep.explain blames whom it must."""

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
  multihost_utils.sync_global_devices("all parts are written")
  if jax.process_index():
    return
  with pytest.raises(ValueError, match="has 2 traces; name one of them"):
    ep.explain(folder)
  code, output = programs.run("-m", "ep.explain", folder)
  assert code == 0
  assert output.count('rank 1 came last to ep_combine in layer "moe_3"') == 2
  left = sorted(x.name for x in folder.iterdir())
  assert left == ["a%2Fb.json.gz", "c.json.gz"]


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
      came = now + 0.005 + rng.exponential(2e-4, 4)
      if op == "ep_combine":
        came += np.array(rows) * 1e-3
      if late and op == late[1]:
        came[late[0]] += late[2]
      now = came.max() + 1e-3
      yield dict(
        op=op, layer="a", program="p", domain=0, step=step, rows=list(rows),
        tokens=[[n - n // 3, n // 3] for n in rows],
        came=came.tolist(), began=[came.max()] * 4, ended=[now] * 4,
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


def test_import_of_the_program_keeps_the_function():
  assert importlib.import_module("ep.explain") is ep.explain


def test_one_spike_is_no_straggler():
  exchanges = list(steps(np.random.default_rng(0)))
  exchanges[31]["came"][1] += 5.0
  assert not explain_exchanges(exchanges).blames


@pytest.mark.parametrize("ahead", [0.0, 7.0, -7.0])
def test_clocks_are_aligned_by_the_exchanges(ahead):
  """Posts are seen 1 ms after they were sent."""
  texts = []
  for p in range(2):
    head = dict(process=p, ep_size=2, processes=[0, 1])
    came = [1.0, 2.0] if p else [1.0, 2.001]
    came = np.add(came, [0.001 * p, 0]) + ahead * p
    end = float(came.max() + 0.1)
    event = dict(
      op="ep_combine", layer="", program="p", site="1", step=0, domain=0,
      began=end, ended=end, came=came.tolist(), rows=[1, 1], dropped=[0, 0],
      bytes=[1, 1], tokens=[[1], [1]],
    )  # fmt: skip
    lines = head, event, dict(lost=0)
    texts.append("".join(json.dumps(line) + "\n" for line in lines))
  merged = merge(texts)
  assert merged["clocks"][1]["bound_s"] == pytest.approx(0.002)
  assert merged["clocks"][1]["offset_s"] == pytest.approx(ahead, abs=0.0011)
  assert merged["exchanges"][0]["came"] == pytest.approx([1, 2], abs=0.0011)
