# SPDX-License-Identifier: Apache-2.0
"""The core and the tools: no import runs upward or in a circle."""

import graphlib
import pathlib
import re

import grimp
import pytest

import ep

# From top to bottom. A package imports only packages of lower layers, not even
# those beside it. An import inside a function counts like any other.
CORE = [
  {"moe"},
  {"ops"},
  {"group"},
  {"backends", "matmul"},
  {"lax", "native"},
  {"base"},
]
TOOLS = [
  {"check"},
  {"debug", "planning"},
  {"records", "stuck", "trace"},
]
BACKENDS = {"host", "nccl", "xla"}


@pytest.fixture(scope="module")
def graph():
  return grimp.build_graph("ep", cache_dir=None)


def illegal(graph, container, layers):
  layers = [grimp.Layer(*layer, independent=True) for layer in layers]
  found = graph.find_illegal_dependencies_for_layers(
    layers, containers={container}
  )
  return [f"{d.importer} imports {d.imported}" for d in found]


@pytest.mark.parametrize(
  "container, layers", [("ep._src", CORE), ("ep._tools", TOOLS)]
)
def test_packages_are_layers(graph, container, layers):
  packages = {m.rpartition(".")[2] for m in graph.find_children(container)}
  assert packages == set().union(*layers)
  assert not illegal(graph, container, layers)


def test_backends_do_not_know_each_other(graph):
  packages = graph.find_children("ep._src.backends")
  assert {m.rpartition(".")[2] for m in packages} == BACKENDS
  assert not illegal(graph, "ep._src.backends", [BACKENDS])


def test_only_bootstrap_knows_the_backends(graph):
  importers = {
    importer
    for module in graph.find_descendants("ep._src.backends")
    for importer in graph.find_modules_that_directly_import(module)
    if importer.startswith("ep._src.")
  }
  assert {m for m in importers if not m.startswith("ep._src.backends")} == {
    "ep._src.group.bootstrap"
  }


def test_no_imports_form_a_circle(graph):
  imports = {
    m: graph.find_modules_directly_imported_by(m) for m in graph.modules
  }
  graphlib.TopologicalSorter(imports).prepare()


def test_the_core_knows_neither_tools_nor_public_modules(graph):
  for module in graph.modules:
    if module.startswith("ep._src."):
      imported = graph.find_modules_directly_imported_by(module)
      assert {m for m in imported if not m.startswith("ep._src.")} == set()


def test_only_compat_imports_private_jax():
  """`_coordinator.py` is a program, which must not import JAX at all."""
  for path in source_files():
    if path.stem not in ("compat", "_coordinator"):
      assert not re.search(r"jax\._src|\b_jax\b", path.read_text()), path


def test_no_import_is_for_type_checkers_alone():
  """Types that only such an import can name would be a circle in disguise."""
  for path in source_files():
    if path.name == "__init__.py":
      continue  # a name that is imported when it is used
    assert "TYPE_CHECKING" not in path.read_text(), path


def source_files():
  return pathlib.Path(ep.__file__).parent.glob("**/*.py")
