# SPDX-License-Identifier: Apache-2.0
"""Public modules have documented and importable names."""

import ast
import inspect
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


def _docstrings():
  """Yields the docstrings of public modules, names and programs."""
  for path in pathlib.Path(ep.__file__).parent.glob("*.py"):
    yield path.name, ast.get_docstring(ast.parse(path.read_text()))
  for module in _MODULES:
    for name in dir(module):
      value = getattr(module, name)
      if getattr(value, "__module__", "").startswith("ep"):
        members = vars(value) if inspect.isclass(value) else {}
        for member, owner in [("", value), *members.items()]:
          yield f"{name} {member}", inspect.getdoc(owner)


def test_docstrings_name_no_file_of_the_repository():
  """An installed package has no pages and no tests."""
  docstrings = list(_docstrings())
  assert len(docstrings) > 200
  for name, text in docstrings:
    found = re.search(r"\b(_src|docs|ep_ffi|examples|tests)/\w+", text or "")
    assert not found, (name, found)


def test_every_name_is_type_checked():
  """mypy checks the uses in public_types.py."""
  uses = (pathlib.Path(__file__).parent / "public_types.py").read_text()
  for module in _LISTING:
    for name in module.__all__:
      assert re.search(rf"\b{name}\b", uses), name
