# SPDX-License-Identifier: Apache-2.0
"""The report of ep.watch joins equal processes, and tells others apart."""

import dataclasses

from ep._tools.watch.report import report
from ep._tools.watch.sharing import Record

_WAITS = Record(
  host="a", pid=10, time=0.0, still_s=60.0, begun=6, launched=6, finished=5,
  name="train", raised="", has_left=False, stack='File "t.py", line 1 in f',
)  # fmt: skip


def with_values(**changes):
  return dataclasses.replace(_WAITS, **changes)


def test_equal_processes_have_one_entry():
  records = {p: with_values(pid=10 + p) for p in (0, 1, 2, 4)}
  records[3] = with_values(
    host="b", pid=7, begun=5, launched=5, stack="\x1b[2J"
  )
  assert [*report(0, 6, records, {}, "")] == [
    "ep.watch: process 0 of 6 stands still for 60 s. Step 5 is the first that"
    " some process has not finished:",
    '  process 3 (b, pid 7): has not begun step 5; finished step 4 ("train"),'
    " for 60 s. Python:",
    "    ?[2J",
    '  processes 0-2, 4 (a, pid 10, 11, 12, 14): launched step 5 ("train"), but'
    " step 5 has not finished, for 60 s. Python:",
    '    File "t.py", line 1 in f',
    "  process 5: unknown; no record of ep.watch.",
  ]


def test_ends_of_processes_are_told_apart():
  """The old record of a silent process does not count as the job's step."""
  records = {
    0: _WAITS,
    1: with_values(begun=3, launched=3, finished=3),
    2: with_values(begun=5, launched=5, has_left=True, stack=""),
    3: with_values(raised="KeyError: 1", finished=6, has_left=True, stack=""),
    4: with_values(begun=9, launched=8),
    5: with_values(begun=9, launched=9, finished=8, name="b"),
  }
  text = "\n".join(report(0, 6, records, {1: (90.0, "dead")}, ""))
  assert "Step 5 is the first" in text
  for line in (
    "process 1 (a, pid 10): is dead. Its last record: has not begun step 3;"
    ' finished step 2 ("train"), for 90 s.',
    "process 2 (a, pid 10): left ep.watch, after 5 steps, for 60 s.",
    "process 3 (a, pid 10): left ep.watch by KeyError: 1, after 6 steps",
    'process 4 (a, pid 10): launched step 8 ("train"), but step 5 has not',
    'process 5 (a, pid 10): has finished step 5, and began step 8 ("b")',
  ):
    assert line in text
