# SPDX-License-Identifier: Apache-2.0
"""The notebook runs in a new kernel, and prints what its comments promise."""

import json
import pathlib
import re

import programs

_NOTEBOOK = pathlib.Path(__file__).parents[2] / "examples/first_steps.ipynb"


def test_the_notebook(monkeypatch):
  """Each cell but the first also runs twice; the file has no outputs."""
  cells = json.loads(_NOTEBOOK.read_text())["cells"]
  cells = [cell for cell in cells if cell["cell_type"] == "code"]
  for cell in cells:
    assert not cell["outputs"] and cell["execution_count"] is None
  first, *others = ["".join(cell["source"]) for cell in cells]
  program = [first] + [cell for cell in others for _ in range(2)]
  monkeypatch.delenv("XLA_FLAGS", raising=False)  # a kernel has one device
  code, output = programs.run("-c", "\n".join(program))
  assert code == 0, output
  promised = re.findall(r"^print\(.*\)  # (.*)$", "\n".join(program), re.M)
  assert len(promised) > len(others)
  assert [line for line in output.splitlines() if line in promised] == promised
