# SPDX-License-Identifier: Apache-2.0
"""Checks the imports of the core and the tools: no cycle, no upward import."""

import graphlib
import pathlib
import re

import grimp
import pytest

import ep

# Layers of packages, from top to bottom. A package imports only packages of
# lower layers, also inside functions.
CORE = [
  {"moe"},
  {"group", "ops"},
  {"backends", "matmul"},
  {"lax", "native"},
  {"base"},
]
TOOLS = [
  {"info"},
  {"check", "collectives", "describe", "place", "watch"},
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


def test_backends_do_not_import_each_other(graph):
  packages = graph.find_children("ep._src.backends")
  assert {m.rpartition(".")[2] for m in packages} == BACKENDS
  assert not illegal(graph, "ep._src.backends", [BACKENDS])


def test_only_bootstrap_imports_the_backends(graph):
  importers = {
    importer
    for module in graph.find_descendants("ep._src.backends")
    for importer in graph.find_modules_that_directly_import(module)
    if importer.startswith("ep._src.")
  }
  assert {m for m in importers if not m.startswith("ep._src.backends")} == {
    "ep._src.group.bootstrap"
  }


def test_imports_have_no_cycle(graph):
  imports = {
    m: graph.find_modules_directly_imported_by(m) for m in graph.modules
  }
  graphlib.TopologicalSorter(imports).prepare()


def test_the_core_imports_neither_tools_nor_public_modules(graph):
  for module in graph.modules:
    if module.startswith("ep._src."):
      imported = graph.find_modules_directly_imported_by(module)
      assert {m for m in imported if not m.startswith("ep._src.")} == set()


def test_only_compat_imports_private_jax():
  """`_coordinator.py` is a program that must not import JAX."""
  for path in source_files():
    if path.stem not in ("compat", "_coordinator"):
      assert not re.search(r"jax\._src|\b_jax\b", path.read_text()), path


def source_files():
  return pathlib.Path(ep.__file__).parent.glob("**/*.py")
