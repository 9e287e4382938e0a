# SPDX-License-Identifier: Apache-2.0
"""Tests the counts, forecasts, tables and errors of ep.plan."""

import dataclasses
import functools
import pathlib
import resource
import time
import xml.etree.ElementTree

import jax
import numpy as np
import pytest

import ep
from ep._tools.planning import command, links
from ep._tools.planning.demand import Counted, Layout
from ep._tools.planning.place import NAMED
from ep._tools.records import files

E, K, T = 16, 3, 20
CFG = ep.MoEConfig(hidden=8, inner=4, num_experts=E, top_k=K, name="moe_3")


def cluster(num_nodes=2, gpus_per_node=4):
  return ep.Cluster.named("dgx_h100", num_nodes, gpus_per_node)


def draw(count, experts=E, top_k=K, seed=0):
  """Draws uniform ids [count, top_k]."""
  rng = np.random.default_rng(seed)
  all_ids = np.tile(np.arange(experts), (count, 1))
  return rng.permuted(all_ids, axis=1)[:, :top_k]


def forecast(cfg, a_cluster, routing, **options):
  (found,) = ep.plan(cfg, a_cluster, routing, **options).forecasts
  return found


def rows_of(ids, layout, gpus, transport):
  """Counts the rows [R, R] from GPU to GPU by following each token."""
  D, P, _, experts = layout
  R = D * P
  rows = np.zeros((R, R), int)
  copies = layout.copies_of(ids)
  for token, own in enumerate(copies):
    source = token // (len(ids) // R)
    first = source // P * P  # The first rank of the domain.
    to = [first + copy // (experts.size // P) for copy in own if copy >= 0]
    if transport == "direct":
      for rank in to:
        rows[source, rank] += 1
      continue
    for node in {rank // gpus for rank in to}:
      entry = node * gpus + source % gpus
      if node != source // gpus:
        rows[source, entry] += 1
      for rank in {rank for rank in to if rank // gpus == node}:
        rows[entry, rank] += 1
  return rows


@pytest.mark.parametrize("transport", links.TRANSPORTS)
@pytest.mark.parametrize(
  "nodes, gpus, ep_size, replicas",
  [
    *[(2, 4, 8, 0), (4, 2, 8, 8), (2, 4, 4, 0), (2, 4, 2, 2), (4, 1, 4, 4)],
    (1, 3, 3, 0),  # two of 18 slots are empty
  ],
)
def test_the_rows_of_each_link_are_those_of_each_token(
  nodes, gpus, ep_size, replicas, transport
):
  ids = draw(nodes * gpus * T)
  ids[::3, 1] = -1
  R = nodes * gpus
  placement = ep.place(
    np.arange(E), cluster(nodes, gpus), ep_size=ep_size, replicas=replicas
  )
  nodes_of_domain = max(1, ep_size // gpus)
  layout = Layout(R // ep_size, ep_size, nodes_of_domain, placement.experts)
  (demand,) = Counted("", [ids], E, R).demands(layout)
  sent, received = links.TRANSPORTS[transport](demand)
  rows = rows_of(ids, layout, gpus, transport)
  node = np.arange(R) // gpus
  local, network = np.eye(R, dtype=bool), node[:, None] != node
  for n, is_kind in enumerate([local, ~local & ~network, network]):
    moved = np.where(is_kind, rows, 0)
    np.testing.assert_array_equal(sent[n], moved.sum(1))
    np.testing.assert_array_equal(received[n], moved.sum(0))


@pytest.mark.parametrize("groups, top_groups, skew", [(1, 1, 0.0), (8, 4, 0.7)])
def test_a_distribution_expects_what_tokens_do(groups, top_groups, skew):
  """Compares counts of routed tokens with the forecast from their loads."""
  cfg = dataclasses.replace(
    CFG, num_experts=64, top_k=8, num_groups=groups, top_groups=top_groups
  )
  R, num_tokens = 8, 4096
  rng = np.random.default_rng(1)
  odds = -skew * np.log(rng.permutation(64) + 1.0)
  logits = odds + rng.gumbel(size=(R * num_tokens, 64))
  route = functools.partial(
    ep.route_topk, top_k=8, num_groups=groups, top_groups=top_groups
  )
  ids = np.asarray(jax.jit(route)(logits.astype(np.float32))[0])
  options = dict(placements=["balanced"], replicas=[16])
  counted = forecast(cfg, cluster(4, 2), ids, **options)
  expected = forecast(
    cfg,
    cluster(4, 2),
    np.bincount(ids.ravel(), minlength=64),
    tokens_per_rank=num_tokens,
    **options,
  )
  np.testing.assert_allclose(expected.rows, counted.rows, rtol=0.03)
  for op, by_link in counted.sent.items():
    for link, want in by_link.items():
      got = expected.sent[op][link]
      np.testing.assert_allclose(got.mean(), want.mean(), rtol=0.03)
      np.testing.assert_allclose(got, want, rtol=0.1)
    assert expected.seconds[op] == pytest.approx(counted.seconds[op], rel=0.05)


def test_ranks_that_do_not_divide_the_experts():
  """16 experts have 7 x 3 slots, and the last two ranks have 1 and none."""
  seven, ids = cluster(1, 7), draw(7 * 512)
  options = dict(ep_sizes=[7], placements=["linear", "balanced"])
  counted = ep.plan(CFG, seven, ids, **options).forecasts
  expected = ep.plan(
    CFG, seven, "uniform", tokens_per_rank=512, **options
  ).forecasts
  loads = np.append(np.bincount(ids.ravel(), minlength=E), [0] * 5)
  np.testing.assert_array_equal(counted[0].rows, loads.reshape(7, 3).sum(1))
  assert counted[1].rows.max() < 1.01 * 3 * loads[:E].mean()
  for got, want in zip(expected, counted, strict=True):
    np.testing.assert_allclose(got.rows.max(), want.rows.max(), rtol=0.05)
    assert got.exchange_s == pytest.approx(want.exchange_s, rel=0.1)


def test_drops_are_those_of_the_steps():
  """Forecasts from loads and counts of ids drop equally many choices."""
  ids = [draw(8 * 256, seed=seed) for seed in range(4)]
  options = dict(capacity_factors=[None, 1.0, 1.02])
  counted = ep.plan(CFG, cluster(), ids, **options).forecasts
  expected = ep.plan(
    CFG, cluster(), "uniform", tokens_per_rank=256, **options
  ).forecasts
  for f, capacity in zip(counted, (8 * 256 * 2, 768, 784), strict=True):
    assert f.capacity == capacity  # Alignment 1, two experts per rank.
    loads = [np.bincount(i.ravel(), minlength=E).reshape(8, -1) for i in ids]
    wanted = np.array(loads).sum(2)
    lost = (wanted - capacity).clip(0).sum() / wanted.sum()
    assert f.dropped == pytest.approx(lost)
    np.testing.assert_allclose(f.rows, wanted.clip(max=capacity).mean(0))
    assert f.receive_bytes == capacity * (2 * 8 + 4)
  got = [f.dropped for f in expected]
  assert got == pytest.approx([f.dropped for f in counted], abs=0.005)
  assert got[0] == 0 < got[2] < got[1]


@pytest.mark.parametrize(
  "exponent, always", [(1.2, 0), (3, 1), (5, 1), (100, 2)]
)
def test_no_choice_of_concentrated_loads_is_lost(exponent, always):
  """Each token chooses all K hot experts, so each of them gets T rows."""
  cfg = dataclasses.replace(CFG, num_experts=8, top_k=2)
  found = forecast(cfg, cluster(), f"zipf:{exponent}", tokens_per_rank=T)
  tokens = 8 * T
  assert found.rows.sum() == tokens * 2 and found.dropped == 0
  assert found.rows.max() <= tokens
  assert (found.rows == tokens).sum() == always
  # A token is sent to a node only once.
  rows = found.sent["ep_combine_bwd"]["network"] / (2 * cfg.hidden)
  assert rows.max() <= T


@pytest.mark.parametrize(
  "name, same",
  [
    ("Uniform", "uniform"),
    ("zipf:0", "uniform"),
    ("zipf:2.", "zipf:2"),
    ("ZIPF:.5", "zipf:5e-1"),
  ],
)
def test_a_distribution_is_no_folder(name, same):
  one, other = (
    forecast(CFG, cluster(), routing, tokens_per_rank=T)
    for routing in (name, same)
  )
  np.testing.assert_array_equal(one.rows, other.rows)
  with pytest.raises(ValueError, match="ep.replay: .*holds no record"):
    ep.plan(CFG, cluster(), pathlib.Path(name))


def test_the_placement_decides_the_rows():
  """All tokens choose two experts, which placements put on different ranks."""
  ids = np.tile(np.arange(2), (8 * T, 1))
  cfg = dataclasses.replace(CFG, top_k=2)
  swapped = np.arange(E)
  swapped[[1, -1]] = swapped[[-1, 1]]
  plan = ep.plan(
    cfg,
    cluster(),
    ids,
    placements=["linear", ep.Placement(swapped), "balanced"],
  )
  linear, given, balanced = plan.forecasts
  np.testing.assert_array_equal(linear.rows, [8 * T * 2] + [0] * 7)
  np.testing.assert_array_equal(given.rows, [8 * T] + [0] * 6 + [8 * T])
  assert sorted(balanced.rows) == sorted(given.rows)
  assert [f.placement for f in plan.forecasts] == [
    "linear",
    "given",
    "balanced",
  ]
  # Each rank has copies of both experts and two others.
  rank, others = np.arange(8), np.arange(2, E)
  copies = np.stack([0 * rank, 0 * rank + 1, others[rank], others[rank + 6]], 1)
  copied = forecast(
    cfg,
    cluster(),
    ids,
    replicas=[16],
    placements=[ep.Placement(copies.ravel())],
  )
  np.testing.assert_array_equal(copied.rows, [2 * T] * 8)


def test_more_copies_of_an_expert_than_ranks_need_no_more_time():
  loads = 1.0 / np.arange(1, E + 1)
  experts = ep.place(loads, cluster(), replicas=E).experts
  number = np.bincount(experts, minlength=E)
  per_rank = (loads / number)[experts].reshape(8, -1).sum(1)
  assert number.min() == 1 and number[0] == number.max()
  assert per_rank.max() < 1.2 * per_rank.mean()
  linear = NAMED["linear"](loads, cluster(), ep_size=8, replicas=E)
  np.testing.assert_array_equal(linear.experts, np.sort(experts))


def test_a_record_and_its_steps(tmp_path, capsys, monkeypatch):
  steps = [draw(8 * T, seed=seed) for seed in range(3)]
  files.Writer(tmp_path, 0).write(
    files.Call("moe_3", 2, 1, rank, step, 0, "jit_f#0/1", step, half)
    for step, ids in enumerate(steps)
    for rank, half in enumerate(np.split(ids, 2))
  )
  of_record = ep.plan(CFG, cluster(), tmp_path, ep_sizes=[4, 8])
  of_replay = ep.plan(CFG, cluster(), ep.replay(tmp_path), ep_sizes=[4, 8])
  assert str(of_record) == str(of_replay)
  given = "--preset=small --nodes=2 --gpus=4 --ep=4,8 --layer=moe_3".split()
  small = {"small": dataclasses.replace(CFG, name="moe")}
  monkeypatch.setattr(ep.presets, "BY_NAME", small)
  command.main([*given, f"--routing={tmp_path}"])
  assert capsys.readouterr().out == f"{of_record}\n"
  assert of_record.tokens_per_rank == T
  of_steps = ep.plan(CFG, cluster(), steps, ep_sizes=[4, 8])
  for got, want in zip(of_record.forecasts, of_steps.forecasts, strict=True):
    np.testing.assert_array_equal(got.rows, want.rows)
    singles = [
      forecast(CFG, cluster(), ids, ep_sizes=[want.ep_size]) for ids in steps
    ]
    for op, seconds in want.seconds.items():
      assert seconds == pytest.approx(np.mean([f.seconds[op] for f in singles]))
      np.testing.assert_allclose(
        want.sent[op]["network"],
        np.mean([f.sent[op]["network"] for f in singles], axis=0),
      )


def test_times_follow_the_cluster():
  ids = draw(8 * T)
  slow = forecast(CFG, cluster(), ids)
  fast = forecast(
    CFG, dataclasses.replace(cluster(), network_gb_s=1e6, latency_us=0.0), ids
  )
  assert fast.exchange_s < 1e-3 * slow.exchange_s
  half = forecast(CFG, cluster(), ids, compute_s=slow.exchange_s)
  assert half.share == pytest.approx(0.5)
  rows = slow.rows.max()  # 3 matrices; 1 forward and 2 backward products.
  flops = 3 * 3 * 2 * CFG.hidden * CFG.inner * rows
  assert slow.compute_s == pytest.approx(flops / 989e12)


def test_a_table_and_a_picture(tmp_path, capsys):
  path = tmp_path / "plan.svg"
  arguments = (
    "--preset=deepseek_v3 --nodes=4 --routing=zipf:0.3 --tokens=256 --ep=8,32"
    " --replicas=0,32 --placements=linear,balanced --capacity_factors=1.25,none"
  )
  command.main([*arguments.split(), f"--picture={path}"])
  title, heads, *rows = capsys.readouterr().out.splitlines()
  assert title.startswith("32 ranks with 256 tokens each, routing zipf:0.3")
  assert heads.split()[:4] == ["EP", "replicas", "placement", "capacity"]
  assert len(rows) == 16 and rows[-1].split()[:3] == ["32", "32", "balanced"]
  texts = [e.text for e in xml.etree.ElementTree.parse(path).iter()]
  assert "EP 8, linear, capacity 1.25" in texts and "ep_dispatch_bwd" in texts
  assert sum(str(text).endswith(" ms") for text in texts) == 16


def test_a_plan_of_no_time(tmp_path):
  alone = dataclasses.replace(cluster(1, 1), latency_us=0)
  plan = ep.plan(CFG, alone, "uniform", tokens_per_rank=T)
  plan.picture(tmp_path / "plan.svg")
  assert "0.00 ms" in (tmp_path / "plan.svg").read_text()
  assert repr(plan) == str(plan) and len(repr(plan).splitlines()) == 3
  text = "<ep.Forecast of EP 1, linear: 0.00 ms, 0.00% dropped>"
  assert repr(plan.forecasts[0]) == text


@pytest.mark.parametrize(
  "argument, words",
  [
    ("--ep=5", "must divide the 24 ranks"),
    ("--nodes=1000000", "8000000 ranks and 256 slots of experts in a domain"),
    ("--replicas=2000000", "2000256 slots of experts in a domain are too many"),
    ("--ep=8,x", "'8,x', but numbers with commas are expected"),
    ("--picture=/none/plan.svg", "/none/plan.svg"),
  ],
)
def test_a_command_that_cannot_be_run_says_why(argument, words, capsys):
  given = "--preset=deepseek_v3", "--nodes=3", "--tokens=8", argument
  with pytest.raises(SystemExit, match="2"):
    command.main(given)
  assert words in capsys.readouterr().err


@pytest.mark.parametrize("sizes", [{}, dict(ep_sizes=[4096], replicas=[3840])])
def test_4096_ranks_take_seconds(sizes):
  start = time.process_time()
  plan = ep.plan(
    ep.presets.DEEPSEEK_V3,
    ep.Cluster.named("dgx_h100", num_nodes=512),
    "zipf:0.5",
    tokens_per_rank=4096,
    **sizes,
  )
  assert time.process_time() - start < 5
  assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2e6  # KiB
  assert plan.forecasts[0].rows.shape == (4096,)


@pytest.mark.parametrize(
  "routing, options, words",
  [
    ("uniform", {}, "tokens_per_rank is None"),
    ("uniform", dict(tokens_per_rank=0), "must be positive"),
    ("zipf:much", {}, "'zipf:much', but \"zipf:A\" has a finite number"),
    ("zipf", {}, "'zipf', but"),
    ("zipf:-1", {}, "A >= 0"),
    ("zipf:inf", {}, "a finite number"),
    ("unifrom", {}, 'neither "uniform" nor "zipf:A" nor a folder'),
    (np.ones(E + 1), dict(tokens_per_rank=8), "loads have shape"),
    (np.eye(E)[0], dict(tokens_per_rank=8), "more experts"),
    ("zipf:1e3", dict(tokens_per_rank=8), "more experts"),
    (np.full((8, K), E), {}, "step 0: topk_idx has ids in 16"),
    (np.zeros((8, K), int), {}, r"topk_idx\[0\] = \[0, 0, 0\] repeats an exp"),
    (np.zeros((7, K), int), {}, "R = 8 ranks"),
    ([], {}, "there is no step"),
    (draw(8, top_k=2), {}, "top_k = 3 choices are expected"),
    (np.zeros((0, K), int), {}, "a token or more"),
    (draw(8), dict(ep_sizes=[3]), "must divide the 8 ranks"),
    (draw(8), dict(replicas=[1]), "multiple of the EP size 8"),
    (draw(8), dict(placements=["best"]), "name one of linear"),
    (draw(8), dict(placements=[np.arange(E)]), "name one of linear"),
    (draw(8), dict(placements=[ep.Placement(range(E - 8))]), "all of 0..15"),
    (draw(8), dict(replicas=[]), "replicas is empty"),
    (draw(8), dict(transport="train"), "must be one of"),
    (draw(8), dict(transport=[]), "must be one of"),
    (draw(8), dict(dtype="int8"), "dtype = int8, but it must be one of"),
    (draw(8), dict(capacity_factors=[-1]), "capacity_factor = -1"),
    (draw(8), dict(compute_s=0), r"compute_s = 0, but it must be positive\.$"),
  ],
)
def test_wrong_arguments_are_refused(routing, options, words):
  with pytest.raises(ValueError, match=f"ep.plan: .*{words}"):
    ep.plan(CFG, cluster(), routing, **options)


def test_clusters_and_placements_are_checked():
  missing = ep.Placement(jax.numpy.arange(E) // 2 * 2)
  with pytest.raises(ValueError, match=r"each of 0\.\.E-1 once or more"):
    ep.plan(CFG, cluster(), draw(8), placements=[missing])
  with pytest.raises(ValueError, match="nvlink_gb_s = 0, but it must be pos"):
    dataclasses.replace(cluster(), nvlink_gb_s=0)
  with pytest.raises(ValueError, match="latency_us = -1, but it must not be"):
    dataclasses.replace(cluster(), latency_us=-1)
  with pytest.raises(ValueError, match="'dgx_2' is not known; name one of"):
    ep.Cluster.named("dgx_2", 1)
  with pytest.raises(TypeError, match="cluster = 8 is a int, but an ep.Cl"):
    ep.plan(CFG, 8, "uniform")
  with pytest.raises(TypeError, match="placements is a str, but a list"):
    ep.plan(CFG, cluster(), draw(8), placements="balanced")


def test_an_expert_that_all_tokens_choose():
  """No token chooses an expert twice, even one with over 1/K of the load."""
  loads = np.where(np.arange(E) == 5, 1e6, 1.0)
  found = forecast(CFG, cluster(), loads, tokens_per_rank=T, ep_sizes=[8])
  others = np.full(8, 8 * T * (K - 1) * 2 / (E - 1))
  others[2] = 8 * T * (1 + (K - 1) / (E - 1))
  np.testing.assert_allclose(found.rows, others, rtol=0.15)
  every = ep.MoEConfig(hidden=8, inner=4, num_experts=E, top_k=E)
  found = forecast(every, cluster(), np.full(E, 0.1), tokens_per_rank=T)
  np.testing.assert_allclose(found.rows, 8 * T * 2, rtol=0.1)
  alone = dataclasses.replace(CFG, num_experts=8)  # One expert per rank.
  found = forecast(alone, cluster(), loads[:8], tokens_per_rank=T)
  assert found.capacity == 8 * T and found.dropped == 0


def test_the_default_ep_size_fits_the_nodes():
  """EP size 32 divides experts and ranks, but not the 72 GPUs of a node."""
  machine = ep.Cluster.named("gb200_nvl72", num_nodes=4)
  cfg = dataclasses.replace(CFG, num_experts=256)
  assert forecast(cfg, machine, "uniform", tokens_per_rank=T).ep_size == 8
  ep.place(np.arange(256), machine)
