# SPDX-License-Identifier: Apache-2.0
"""Public modules have documented and importable names."""

import pathlib
import pickle
import pydoc
import re
import typing

import pytest

import ep

_LISTING = ep, ep.lax, ep.moe, ep.quant, ep.testing
_MODULES = *_LISTING, ep.launch, ep.presets
_PUBLIC = [
  (module, name)
  for module in _LISTING
  for name in module.__all__
  if hasattr(getattr(module, name), "__module__")
]


@pytest.mark.parametrize("module", _LISTING, ids=lambda m: m.__name__)
def test_help_shows_public_names(module):
  """`help` and `dir` list the public names; `help` shows their docs."""
  text = pydoc.plain(pydoc.render_doc(module))
  for name in module.__all__:
    value = getattr(module, name)
    assert name in dir(module)
    assert name in text
    if hasattr(value, "__module__"):
      assert value.__doc__.splitlines()[0] in text


def test_only_public_names_are_seen():
  assert dir(ep) == sorted(ep.__all__)
  names = {}
  exec("from ep import *", names)
  assert names.keys() - {"__builtins__"} == set(ep.__all__)


@pytest.mark.parametrize(
  "module, name", _PUBLIC, ids=[f"{m.__name__}.{n}" for m, n in _PUBLIC]
)
def test_a_name_belongs_to_its_public_module(module, name):
  value = getattr(module, name)
  assert value.__module__ in (module.__name__, "ep")
  assert pickle.loads(pickle.dumps(value)) is value
  # `get_type_hints` looks up names of annotations in the defining module.
  typing.get_type_hints(value)


def test_every_name_is_type_checked():
  """mypy checks the uses in public_types.py."""
  uses = (pathlib.Path(__file__).parent / "public_types.py").read_text()
  for module in _LISTING:
    for name in module.__all__:
      assert re.search(rf"\b{name}\b", uses), name
