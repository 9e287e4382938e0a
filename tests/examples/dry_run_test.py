# SPDX-License-Identifier: Apache-2.0
"""dry_run prints the output that docs/howto/without_accelerators.md shows."""

import pathlib
import re
import sys

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import pytest

from conftest import make_mesh
import dry_run
import ep
import programs
import quick_compiler

_PAGE = pathlib.Path(__file__).parents[2] / "docs/howto/without_accelerators.md"


def _lines(output):
  """Returns the lines that do not depend on the compiler."""
  return [line for line in output.splitlines() if "deviation" not in line]


def test_the_program_prints_what_its_page_says(monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", quick_compiler.FLAGS)  # Sets no device count.
  code, output = programs.run(dry_run.__file__)
  assert code == 0, output
  shown = re.search(r"^64 devices, {.*?(?=```)", _PAGE.read_text(), re.M | re.S)
  assert _lines(output) == _lines(shown[0])


def test_arguments_are_refused(monkeypatch, capsys):
  monkeypatch.setattr(sys, "argv", ["dry_run.py", "--steps=3"])
  with pytest.raises(SystemExit):
    dry_run.main()
  assert "unrecognized arguments: --steps=3" in capsys.readouterr().err


def test_a_wrong_sharding_of_the_batch_is_found(monkeypatch):
  """XLA would reshard the batch with a hidden all-to-all."""
  monkeypatch.setattr(dry_run, "TOKENS", P(None, *dry_run.TOKENS))
  mesh = make_mesh(dict(zip(dry_run.AXES, (1, 2, 2, 1), strict=True)))
  cfg = ep.presets.scaled(dry_run.MODEL, 64)
  types = dry_run.inputs(mesh, cfg, (8, 16), jnp.float32)
  compiled = dry_run.compile_step(mesh, cfg, types)
  with pytest.raises(AssertionError, match="all-to-all"):
    ep.assert_no_hidden_collectives(compiled, allow=dry_run.MEANT)
