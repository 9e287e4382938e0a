# SPDX-License-Identifier: Apache-2.0
"""A run whose ranks are killed has the losses of a run that nobody disturbs."""

import kills


def test_a_run_with_three_kills(tmp_path):
  """Goes on with three ranks, all four, and three; repeats a few steps."""
  causes = "killed", "in a snapshot", "with the coordinator"
  failures = kills.plan(3, causes)
  run = kills.compare(tmp_path, failures, min_processes=3)
  assert [ranks for _, ranks, *_ in run.restarts] == [3, 4, 3]
  for failure, (why, _, _, step) in zip(failures, run.restarts, strict=True):
    assert "was killed by signal 9" in why
    # The last snapshot may have been incomplete.
    assert failure.step - 1 - step < 2 * kills.SNAPSHOT_EVERY
