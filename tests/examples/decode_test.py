# SPDX-License-Identifier: Apache-2.0
"""The decode example's steps agree with one pass over all tokens."""

import re

import pytest

import decode
import programs

FLAGS = [
  "--layers=1",
  "--hidden=32",
  "--inner=8",
  "--prompt=3",
  "--new=2",
]


def test_batches_that_devices_can_and_cannot_split(monkeypatch, capfd):
  flags = [*FLAGS, "--batches=1,4"]
  code, output = programs.run_here(decode.main, flags, monkeypatch, capfd)
  assert not code, output
  assert re.findall(r"^ +(\d+) +\S+ +\S+ +\S+ +\S+$", output, re.M) == [
    "1",
    "4",
  ]


def test_a_wrong_cache_is_an_error(monkeypatch, capfd):
  def forgetful(append, p, x, positions, keys, values):
    y, _ = append(p, x, positions, keys, values)
    return y, (keys, values)

  attend = decode.attend
  monkeypatch.setattr(decode, "attend", lambda *args: forgetful(attend, *args))
  with pytest.raises(AssertionError):
    programs.run_here(decode.main, [*FLAGS, "--batches=4"], monkeypatch, capfd)


@pytest.mark.parametrize(
  "flags, message",
  [
    (["--hidden=40"], "hidden must be a multiple of 32"),
    (["--top_k=9"], "top_k must not exceed num_experts"),
    (["--batches=1,x"], "batches must be positive integers"),
    (["--batches=0"], "batches must be positive integers"),
    (["stray"], "unexpected arguments"),
  ],
)
def test_bad_flags_are_explained(monkeypatch, capfd, flags, message):
  output = programs.refusal(decode.main, flags, monkeypatch, capfd)
  assert output.count(message) == 1, output
