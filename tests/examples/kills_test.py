# SPDX-License-Identifier: Apache-2.0
"""A run whose ranks are killed has the losses of a run that nobody disturbs."""

import kills


def test_a_run_with_two_kills(tmp_path):
  """Continues with three ranks, then with all four; repeats a few steps."""
  failures = kills.plan(2, ("in a snapshot", "with the coordinator"))
  run = kills.compare(tmp_path, failures, min_processes=3)
  assert [ranks for _, ranks, *_ in run.restarts] == [3, 4]
  for failure, (why, _, _, step) in zip(failures, run.restarts, strict=True):
    assert "was killed by signal 9" in why
    # The last snapshot may have been incomplete.
    assert failure.step - 1 - step < 2 * kills.SNAPSHOT_EVERY
