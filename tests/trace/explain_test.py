# SPDX-License-Identifier: Apache-2.0
"""ep.explain reads traces, and blames the right ranks."""

import contextlib
import gzip
import json
import tracemalloc

import numpy as np
import pytest

import ep
from ep._tools.trace import chrome
from ep._tools.trace.explain import explain_exchanges
from ep._tools.trace.trace import merge


def test_a_part_that_is_missing_is_named(tmp_path):
  with pytest.raises(ValueError, match="has no trace. If it was EP_TRACE"):
    ep.explain(tmp_path)
  head = json.dumps(dict(process=0, ep_size=2, processes=[0, 1])) + "\n"
  for text, missing in (head + '{"lost": 0}\n', 1), (head, 0), ("", 0):
    (tmp_path / "ep0.json.gz.part0").write_text(text)
    with pytest.raises(ValueError, match=f"part{missing} is missing or has no"):
      ep.explain(tmp_path)


def steps(rng, late=None, rows=(9, 9, 9, 9), num_steps=20):
  """Yields exchanges of 20 ms steps with noise; `late` is (rank, op, s).

  Experts take 1 ms per row.
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
    assert "times the mean rows" in repr(found) == str(found)


@pytest.mark.parametrize("seed", range(20))
def test_all_late_ranks_are_blamed(seed):
  """Three late ranks are blamed, although none is last in half the steps."""
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


def test_a_small_file_does_not_expand_to_any_size(tmp_path):
  path = tmp_path / "steps.json.gz"
  path.write_bytes(gzip.compress(b'{"ep": {}}' + b" " * 10**8))
  tracemalloc.start()
  with pytest.raises(ValueError, match="is not a file of ep.trace, or is"):
    ep.explain(path)
  _, peak = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert peak < 4e7


def test_files_of_processes_that_cannot_be_merged(tmp_path):
  path = tmp_path / "steps.json"
  mine = tmp_path / "steps.json.part0"
  mine.write_bytes(b'{"process": 0, "\xff": 0}\n{"lost": 0}\n')
  with pytest.raises(ValueError, match="part. is not a file of .*ep_size"):
    ep.explain(path)
  mine.write_text(part(0, [[1.0, 2.0]], 0, (0, 0)))
  path.symlink_to("/dev/full")
  with pytest.raises(ValueError, match="json: No space .*; cure this, and"):
    ep.explain(tmp_path)
  path.unlink()
  with pytest.raises(ValueError, match="fewer than three steps"):
    ep.explain(tmp_path)
  assert path.exists() and not mine.exists()
  with pytest.raises(ValueError, match="not end with .json.gz, name the file"):
    ep.explain(tmp_path)


@pytest.mark.parametrize("name", BAD)
def test_another_file_is_refused(name, tmp_path):
  path = tmp_path / "steps.json.gz"
  path.write_bytes(BAD[name])
  with pytest.raises(ValueError, match="gz is not a file of ep.trace, or is"):
    ep.explain(path)


def test_any_wrong_value_of_a_file_is_a_value_error(tmp_path):
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
    whole |= dict(clocks={"0": dict(offset_s=0.0, bound_s=0.0)})
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


@pytest.mark.parametrize("bound_s", [0.018, 0.001, None])
def test_uncertain_clocks_are_reported(bound_s, tmp_path):
  path = tmp_path / "steps.json"
  whole = dict(
    ep_size=4, failures=[], exchanges=list(steps(np.random.default_rng(0))),
    clocks={"0": dict(bound_s=0.0), "1": dict(bound_s=bound_s)},
  )  # fmt: skip
  path.write_text(json.dumps(dict(ep=whole)))
  last = str(ep.explain(path)).splitlines()[-1]
  is_reported = last.startswith("The offsets between clocks are known to 18.0")
  assert is_reported == (bound_s == 0.018)


def part(process, came, step, processes=(0, 1)):
  """Returns one process's trace file text, for exchanges arriving at `came`."""
  lines = [dict(process=process, ep_size=2, processes=processes)]
  for times in came:
    end = max(times) + 0.1
    event = dict(
      op="ep_combine", layer="", program="p", site="1", step=step,
      domain=processes.index(process) // 2,
      began=end, ended=end, came=times, rows=[1, 1], dropped=[0, 0],
      bytes=[1, 1], tokens=[[1], [1]],
    )  # fmt: skip
    lines.append(event)
  lines.append(dict(lost=0))
  return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.mark.parametrize("ahead", [0.0, 7.0, -7.0])
def test_clocks_are_aligned_by_the_exchanges(ahead):
  """Each process sees the arrival of the other process 1 ms late."""
  theirs = [1.001 + ahead, 2.0 + ahead]
  merged = merge([part(0, [[1.0, 2.001]], 0), part(1, [theirs], 0)])
  assert merged["clocks"][1]["bound_s"] == pytest.approx(0.002)
  assert merged["clocks"][1]["offset_s"] == pytest.approx(ahead, abs=0.0011)
  assert merged["exchanges"][0]["came"] == pytest.approx([1, 2], abs=0.0011)


def test_the_clocks_of_a_domain_without_the_first_process_are_aligned():
  came = [1.0, 2.0], [1.0, 2.0], [1.0, 2.001], [7001.001, 7002.0]
  parts = [part(p, [times], 0, (0, 1, 2, 3)) for p, times in enumerate(came)]
  merged = merge(parts)
  assert merged["clocks"][2] == dict(offset_s=0.0, bound_s=None)
  assert merged["clocks"][3]["offset_s"] == pytest.approx(7000, abs=0.0011)
  for e in merged["exchanges"]:
    assert e["came"] == pytest.approx([1, 2], abs=0.0011)


def test_clocks_of_other_speeds_have_a_bound():
  """The second clock gains 20 ms in 10 s."""
  ours = [[0.0, 0.001], [10.0, 10.001]]
  theirs = [[5.001, 5.0], [15.021, 15.02]]
  merged = merge([part(0, ours, 0), part(1, theirs, 0)])
  clock = merged["clocks"][1]
  assert clock["bound_s"] == pytest.approx(0.018)
  assert clock["offset_s"] == pytest.approx(5.001)
  # Rank 0 arrives last in the first op, and rank 1 in the second.
  slices = [e for e in chrome.events(merged) if e["ph"] == "X"]
  for e in slices:
    is_marked = e["args"].get("clock") == "wrong by up to 18.0 ms"
    assert is_marked == (e["tid"] == (1 if e["ts"] < 5e6 else 0))


@pytest.mark.parametrize("rows, ratio", [([0, 1, 0, 1], 2), ([0] * 4, 0)])
def test_the_imbalance_of_fewer_rows_than_ranks(rows, ratio):
  steps_of_ranks = steps(np.random.default_rng(0), rows=rows, num_steps=1)
  none = dict(dropped=[0] * 4, bytes=[0] * 4)
  merged = dict(
    exchanges=[e | none for e in steps_of_ranks],
    **dict(ep_size=4, processes=[0] * 4, clocks={0: dict(bound_s=None)}),
  )
  args = {e["name"]: e.get("args") for e in chrome.events(merged)}
  assert args["imbalance a"] == {"max/mean": ratio}


def test_a_trace_that_begins_within_a_loop_leaves_it_out():
  """`merge` leaves out a loop if one process lacks one of its iterations."""
  merged = merge([part(0, [[1, 1], [2, 2]], 0), part(1, [[2, 2]], 0)])
  assert merged["exchanges"] == []
  assert merged["clocks"][1] == dict(offset_s=0.0, bound_s=None)
