# SPDX-License-Identifier: Apache-2.0
"""The MoE example gives the same bits in all layouts and detects deviations.

The notebook runs in a new kernel, and prints what its comments promise.
"""

import json
import pathlib
import re

import numpy as np
import pytest

import ep_moe
import programs
import quick_compiler

_NOTEBOOK = pathlib.Path(__file__).parents[2] / "examples/first_steps.ipynb"


@pytest.fixture(name="run")
def run_of_program(monkeypatch, capfd):
  def run(*given):
    code, output = programs.run_here(ep_moe.main, given, monkeypatch, capfd)
    assert code == 0, output
    return output

  return run


def _digests(output):
  return re.findall(r"^(output|grad of \w+) +([0-9a-f]{16})", output, re.M)


def test_layouts_agree_bit_for_bit_and_with_the_dense_model(run):
  one = run("--num_processes=1")
  assert "OK: no value deviates" in one
  names = ["output", *(f"grad of {name}" for name in ep_moe.SHARDING)]
  assert sorted(name for name, _ in _digests(one)) == sorted(names)

  # One rank on the xla backend, the default of a single GPU.
  alone = run("--dp=1", "--ep=1", "--num_processes=1", "--backend=xla")
  assert "1 x 1 (dp, ep) mesh, processes: 1" in alone
  assert "OK: no value deviates" in alone

  joined = run("--num_processes=2", "--nocheck")
  assert _digests(joined) == _digests(one)
  assert _table(joined) == _table(one)
  assert "OK" not in joined


def _table(output):
  """Returns each rank's sent, received and dropped tokens, and imbalance."""
  rows = re.findall(r"^(\(\d, \d\).*?) +\S+ ms +\S+ ms$", output, re.M)
  assert len(rows) == 4, output
  sent = [int(row.split()[2]) for row in rows]
  received = [int(row.split()[3]) for row in rows]
  assert sent == [512 * 2] * 4
  for domain in (slice(0, 2), slice(2, 4)):
    assert sum(received[domain]) == sum(sent[domain])
  return rows


def test_the_check_detects_a_wrong_value(capsys):
  expected = {"a": np.random.default_rng(0).normal(size=(4, 5))}
  for wrong_value in (1e-3, np.nan, np.inf):
    wrong = {"a": expected["a"].copy()}
    wrong["a"][2, 3] += wrong_value
    deviations = ep_moe.relative_deviations(wrong, expected)
    assert ep_moe.verdict(deviations, 1e-6) == 1
    assert "FAILED: a: " in capsys.readouterr().out


def test_the_notebook(monkeypatch):
  """Each cell but the first also runs twice; the file has no outputs."""
  cells = json.loads(_NOTEBOOK.read_text())["cells"]
  cells = [cell for cell in cells if cell["cell_type"] == "code"]
  for cell in cells:
    assert not cell["outputs"] and cell["execution_count"] is None
  first, *others = ["".join(cell["source"]) for cell in cells]
  program = [first] + [cell for cell in others for _ in range(2)]
  # Without a flag for more, the kernel has one device.
  monkeypatch.setenv("XLA_FLAGS", quick_compiler.FLAGS)
  code, output = programs.run("-c", "\n".join(program))
  assert code == 0, output
  promised = re.findall(r"^print\(.*\)  # (.*)$", "\n".join(program), re.M)
  assert len(promised) > len(others)
  assert [line for line in output.splitlines() if line in promised] == promised
