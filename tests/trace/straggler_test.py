# SPDX-License-Identifier: Apache-2.0
"""ep.explain finds slow ranks in deep models and in traces of many programs."""

import numpy as np
import pytest

from ep._tools.trace.explain import explain_exchanges

OPS = "ep_prepare", "ep_dispatch", "ep_combine", "ep_combine_bwd"
RANKS, WORK_S, MOVE_S = 4, 1e-3, 2e-4
SEEDS = range(100)


def steps(work, program="step", *, now=0.0, first=0, clocks=(0.0,) * RANKS):
  """Yields the exchanges of a program; returns the time of the last end.

  Args:
    work: seconds that a rank computes before an op, [step, layer, op, rank].
    first: the number of the first step.
    clocks: how far each rank's clock is ahead.
  """
  rows = [8] * RANKS
  for number, step in enumerate(work, first):
    flat = step.reshape(-1, RANKS)
    ends = now + np.cumsum(flat.max(1) + MOVE_S)
    came = np.append(now, ends[:-1])[:, np.newaxis] + flat + clocks
    ended = ends[:, np.newaxis] + clocks
    now = ends[-1]
    for i, (arrivals, end) in enumerate(zip(came, ended, strict=True)):
      layer, op = divmod(i, len(OPS))
      yield dict(
        op=OPS[op], layer=str(layer), program=program, domain=0, step=number,
        rows=rows, tokens=[[n] for n in rows], came=arrivals.tolist(),
        ended=end.tolist(),
      )  # fmt: skip
  return now


def bursts(rng, shape):
  """In a fifth of three successive steps each, one rank is 30 % slower."""
  more = np.zeros(shape)
  for first in range(0, len(more), 3):
    if rng.random() < 0.2:
      more[first : first + 3, ..., rng.integers(RANKS)] = 0.3 * WORK_S
  return more


def pauses(rng, shape):
  """In each step, any rank pauses at the first op, for a third of the step."""
  more = np.zeros(shape)
  for step in more:
    step[0, 0, rng.integers(RANKS)] = 0.5 * step[..., 0].size * WORK_S
  return more


# Times that a rank computes besides WORK_S, in runs without a slow rank.
NOISES = {
  "quiet": lambda rng, shape: rng.exponential(0.05 * WORK_S, shape),
  "busy": lambda rng, shape: rng.exponential(WORK_S, shape),
  "heavy tails": lambda rng, shape: 0.1 * WORK_S * rng.pareto(1.5, shape),
  "unequal loads": lambda rng, shape: WORK_S * rng.gamma(2, 0.5, shape),
  "unequal steps": lambda rng, shape: (
    WORK_S * rng.exponential(1, (*shape[:1], 1, 1, 1)) * rng.random(shape)
  ),
  "unequal ranks": lambda rng, shape: np.broadcast_to(
    0.03 * WORK_S * rng.random(RANKS), shape
  ),
  "bursts": bursts,
  "pauses": pauses,
}


def work(rng, noise="quiet", *, depth, num_steps=12):
  shape = num_steps, depth, len(OPS), RANKS
  return WORK_S + NOISES[noise](rng, shape)


def any_clocks(rng):
  return rng.uniform(-2e-4, 2e-4, RANKS)


@pytest.mark.parametrize("noise", NOISES)
def test_equal_ranks_are_not_blamed(noise):
  for seed in SEEDS:
    rng = np.random.default_rng(seed)
    depth = int(rng.choice([1, 2, 8, 24, 48]))
    times = work(rng, noise, depth=depth)
    clean = steps(times, clocks=any_clocks(rng))
    assert not explain_exchanges(list(clean)).blames, (seed, depth)


@pytest.mark.parametrize("num_late", [1, 2, 4, 12, 48])
@pytest.mark.parametrize("op", ["ep_combine", ""])
def test_a_slow_rank_is_blamed_in_any_number_of_layers(num_late, op):
  """A rank is late by 30 % of a step, at one op of some layers, or at all."""
  for seed in SEEDS:
    rng = np.random.default_rng(seed)
    depth = int(rng.integers(num_late, min(2 * num_late, 48) + 1))
    noise = rng.choice(["quiet", "heavy tails"])
    times = work(rng, noise, depth=depth, num_steps=16)
    late_s = max(0.3 * len(OPS) * depth * WORK_S, 8e-3)
    rank = int(rng.integers(RANKS))
    is_late = np.zeros(times.shape[1:3], bool)
    is_late[rng.choice(depth, num_late, replace=False)] = [
      op in ("", name) for name in OPS
    ]
    times[:, is_late, rank] += late_s / is_late.sum()
    found = explain_exchanges(list(steps(times, clocks=any_clocks(rng))))
    assert {b.rank for b in found.blames} == {rank}, (seed, depth)
    assert not op or {b.op for b in found.blames} == {op}
    total_s = sum(b.late_s for b in found.blames)
    assert total_s == pytest.approx(late_s, rel=0.5), (seed, depth)


@pytest.mark.parametrize("depth", [1, 8, 48])
def test_a_rank_that_is_twice_as_slow_is_blamed(depth):
  """Every op of the rank takes twice as long; two ranks may be slow."""
  for seed in SEEDS:
    rng = np.random.default_rng(seed)
    times = 5 * work(rng, depth=depth)
    late = rng.choice(RANKS, int(rng.integers(1, 3)), replace=False).tolist()
    times[..., late] *= 2
    found = explain_exchanges(list(steps(times)))
    assert {b.rank for b in found.blames} == {*late}, seed


def test_a_sum_names_its_op_and_its_cause():
  rng = np.random.default_rng(0)
  times = work(rng, depth=16)
  times[..., OPS.index("ep_combine"), 2] *= 3
  exchanges = list(steps(times))
  found = explain_exchanges(exchanges)
  (blame,) = found.blames
  assert (blame.rank, blame.op, blame.num_ops) == (2, "ep_combine", 64)
  assert "domain 0, rank 2 came late in 100% of the steps, by" in str(found)
  assert "ms summed over 64 ops, most of it at ep_combine; its" in str(found)
  assert "its rows were average: it computed longer before." in str(found)
  for e in exchanges:
    e["rows"] = [8, 8, 24, 8]
  (blame,) = explain_exchanges(exchanges).blames
  assert blame.rows_ratio == 2
  assert blame.balanced_s < 0.5 * blame.late_s
  assert "its experts had 2.0 times the mean rows; balanced it" in str(blame)


def test_a_sum_leaves_out_ops_with_blames_of_their_own():
  """A rank is 30 ms late at an op, and 1 ms at each of 31 other ops."""
  times = work(np.random.default_rng(0), depth=8)
  times[..., 1] += 1e-3
  times[:, 3, 1, 1] += 29e-3
  found = explain_exchanges(list(steps(times))).blames
  late = {(b.num_ops, b.layer): b.late_s for b in found}
  assert late == pytest.approx({(1, "3"): 30e-3, (31, ""): 31e-3}, rel=0.1)


def test_overlapping_ops_count_once():
  """A rank is late by 6 % of a step, at two ops that wait together."""
  times = np.full((12, 16, len(OPS), RANKS), 5 * WORK_S)
  times[..., 1] *= 1.06
  exchanges = []
  for e in steps(times):
    exchanges += e, e | dict(op=f"{e['op']}_bwd")
  assert not explain_exchanges(exchanges).blames


def turns(**work):
  """Yields the exchanges of programs that take turns; `work` as for `steps`."""
  now = 0.0
  for number, turn in enumerate(zip(*work.values(), strict=True)):
    for program, step in zip(work, turn, strict=True):
      now = yield from steps(step[np.newaxis], program, now=now, first=number)


@pytest.mark.parametrize("late_program", ["train", "evaluate", "decode"])
def test_a_rank_is_blamed_in_the_program_in_which_it_is_late(late_program):
  for seed in SEEDS:
    rng = np.random.default_rng(seed)
    depths = dict(train=8, evaluate=4, decode=2)
    times = {name: work(rng, depth=depth) for name, depth in depths.items()}
    times["decode_2"] = work(rng, depth=1)
    rank = int(rng.integers(RANKS))
    times[late_program][:, 0, 1, rank] += 0.3
    found = explain_exchanges(list(turns(**times)))
    parts = found, *found.others
    assert {p.program for p in parts} == {*times}
    assert found.program == late_program
    assert [p.num_steps * p.step_s for p in parts] == sorted(
      (p.num_steps * p.step_s for p in parts), reverse=True
    )
    blames = {p.program: [b.rank for b in p.blames] for p in parts}
    assert blames.pop(late_program) == [rank]
    assert not any(blames.values())


def test_the_report_has_a_part_for_each_program():
  rng = np.random.default_rng(0)
  times = dict(train=work(rng, depth=8), evaluate=work(rng, depth=4))
  once = list(steps(work(rng, depth=1, num_steps=2), "once"))
  times["train"][:, 2, 1, 3] += 0.3
  lines = str(explain_exchanges([*once, *turns(**times)])).splitlines()
  assert lines[0] == "program train:"
  assert lines[1].startswith("domain 0, rank 3 came late to ep_dispatch in lay")
  assert lines[2].startswith("step (median of 11)")
  assert lines[7:9] == ["program evaluate:", "No rank is to blame."]
  assert len(lines) == 14
  alone = str(explain_exchanges(list(steps(times["evaluate"]))))
  assert alone.startswith("No rank is to blame.\nstep (median of 11)")


def test_steps_of_several_programs_do_not_add_up():
  rng = np.random.default_rng(0)
  times = work(rng, depth=1, num_steps=2)
  with pytest.raises(ValueError, match="has fewer than three steps"):
    explain_exchanges(list(turns(train=times, evaluate=times)))
