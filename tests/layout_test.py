# SPDX-License-Identifier: Apache-2.0
"""The layers of the package: no import runs upward or in a circle."""

import pathlib

import grimp
import pytest

import ep

PACKAGE = "ep._src"

# From top to bottom. A module imports only modules of lower layers, not even
# those beside it. An import inside a function counts like any other.
LAYERS = [
  {"moe", "moe_apply"},
  {"fold", "moe_metrics", "moe_params", "padding"},
  {"moe_config"},
  {"chunks"},
  {"experts"},
  {"combine"},
  {"capacity", "dispatch", "prepare"},
  {"assignment"},
  {"bootstrap", "collectives_check", "describe", "primitive"},
  {"handle", "replay"},
  {"sharding"},
  {"group", "host_backend", "nccl_backend", "xla_backend"},
  {"ending", "membership", "native", "xla_checks"},
  {"versions", "xla_exchange"},
  {"used_rows"},
  {"grouped_matmul"},
  {"ragged", "tiles"},
  {"row_buffers"},
  {"ffi", "nccl_files", "xla_plan"},
  {"backend", "record"},
  {"config", "router_losses", "routing_map"},
  {"files", "meshes", "ordered_sum", "presence", "program", "router"},
  {"ragged_all_to_all"},
  {"batching", "failing", "loads", "record_files", "reverse_mode"},
  {"arguments", "checked", "compat", "errors", "te_names"},
  # These stand alone: programs of the launcher, the oracle, a check on import.
  {"coordinator", "gpus", "jax_version", "public", "reference"},
]

# The same for the files of ep.testing.
TESTING = [
  {"_rank", "_report"},
  {"_rules"},
  {"_bench"},
  {"_dense"},
  {"_round_trip"},
  {"_ranks", "_trial"},
  {"_compare", "_subjects"},
  {"_footprint", "_numbers", "_routings"},
]


@pytest.fixture(scope="module")
def graph():
  return grimp.build_graph("ep", cache_dir=None)


EVERY_PACKAGE = pytest.mark.parametrize(
  "package, layers", [(PACKAGE, LAYERS), ("ep.testing", TESTING)]
)


@EVERY_PACKAGE
def test_every_module_is_in_one_layer(graph, package, layers):
  listed = [module for layer in layers for module in layer]
  found = {m.rpartition(".")[2] for m in graph.find_children(package)}
  assert sorted(listed) == sorted(found)


@EVERY_PACKAGE
def test_no_import_runs_upward(graph, package, layers):
  layers = [grimp.Layer(*layer, independent=True) for layer in layers]
  wrong = graph.find_illegal_dependencies_for_layers(
    layers, containers={package}
  )
  assert not wrong, [f"{d.importer} imports {d.imported}" for d in wrong]


def test_the_implementation_knows_no_public_module(graph):
  public = "debug", "launch", "lax", "moe", "presets", "testing"
  for module in ("ep", *(f"ep.{name}" for name in public)):
    importers = graph.find_modules_that_directly_import(module)
    assert not {m for m in importers if m.startswith(PACKAGE)}


@pytest.mark.parametrize("backend", ["host", "nccl", "xla"])
def test_only_bootstrap_knows_the_backends(graph, backend):
  importers = graph.find_modules_that_directly_import(
    f"{PACKAGE}.{backend}_backend"
  )
  assert importers == {f"{PACKAGE}.bootstrap"}


def test_no_import_is_for_type_checkers_alone():
  """Types that only such an import can name would be a circle in disguise."""
  files = pathlib.Path(ep.__file__).parent.glob("_src/*.py")
  for path in files:
    assert "TYPE_CHECKING" not in path.read_text(), path
