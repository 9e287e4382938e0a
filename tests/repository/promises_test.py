# SPDX-License-Identifier: Apache-2.0
"""Each promise of a page has a test that holds it.

The table has the headings of three pages. A heading without tests explains what
another one promises.
"""

import pathlib
import re

import pytest

_ROOT = pathlib.Path(__file__).parents[2]

# For each page: its headings, and the tests, as "folder/file: test, test".
PROMISES = {
  "semantics": {
    "The routing": "ops/rules: rule, draw",
    "Drops": "ops/rules: rule, draw; ops/overflow: policies",
    "Dispatch and combine as matrices": "ops/rules: rule, draw",
    "Derivatives": "ops/rules: rule, draw;"
    " ops/transformations: derivative, hessian",
    "The numeric contract": "ops/rules: rule, draw;"
    " ops/dispatch: special_values, bits_do_not_depend_on_the_number_of_ranks,"
    " a_sum_is_not_rounded_between_its_terms",
    "fp8 rows": "ops/rules: rule; ops/wire: rounded_rows",
    "Quantizers": "ops/quantizers: every_number_of_16_bits",
    "Sizes and defaults": "group/bootstrap:"
    " the_default_capacity_is_the_worst_case",
    "Two views": "ops/rules: draw; ops/views: views_agree",
    "Under JAX's transformations": "ops/transformations:"
    " scan_over_layers_with_stacked_handles, each_example_has_its_gradients;"
    " ops/overflow: the_routing_of_a_checkpointed_block_is_exchanged_once;"
    " ops/handle: ranks_can_branch_on_the_largest_load;"
    " ops/modes: programs; moe/layer: strict_modes",
    "A worked example": "repository/docs: the_worked_example;"
    " ops/overflow: the_worked_example",
  },
  "errors": {
    "Errors by cause": "ops/errors: an_id_out_of_range,"
    " a_handle_that_was_not_prepared; ops/arrays:"
    " a_mesh_that_is_not_the_groups; group/mesh:"
    " other_orders_of_the_devices_are_refused; group/bootstrap:"
    " groups_layers_and_handles_refuse_pickle; group/mismatch: other_layers;"
    " refusals: refuses",
    "My job hangs": "watch/watch: a_process_that_is_elsewhere_is_named,"
    " a_stopped_process_is_named",
    "Read a missing rank": "group/ends: a_rank_dies",
    "Checked mode": "ops/errors: a_combine_that_is_not_finite",
    "Collectives of XLA": "group/ends:"
    " ranks_wait_in_a_psum_for_a_rank_that_failed",
    "Other backends": "moe/flagged: a_handle_carries_each_fault,"
    " metrics_carry_each_fault;"
    " backends/xla_backend: a_forged_handle_gives_nan",
    "When a process of `xla` is missing": "group/ends:"
    " a_rank_of_xla_is_missing, all_that_left_are_named",
    "Promises": "group/ends: a_rank_dies, a_rank_exits; group/soak: soak;"
    " group/lifetime: groups, the_parent_goes_on",
  },
  "sharp_bits": {
    "Everyone": "",
    "Launches in flight": "group/concurrency: many_threads",
    "Finalize after the results": "ops/errors:"
    " leaving_a_groups_context_waits_for_programs_in_flight;"
    " group/lifetime: finalize_with_launches_in_flight",
    "Every rank runs every exchange": "group/mismatch: one_call_fewer",
    "Rows past the last segment": "ops/rules: draw;"
    " ops/errors: an_unspecified_tail_is_nan",
    "Same code, same order": "group/mismatch: another_number_of_compilations",
    "Rare": "",
    "One order of launches": "group/concurrency:"
    " a_thread_goes_on_after_another",
    "Axes that shard a model": "group/bootstrap:"
    " a_model_axis_that_shards_tokens_by_default",
    "Weights twice": "ops/rules: draw",
    "Coming from TransformerEngine": "group/bootstrap:"
    " an_alignment_of_zero_is_one",
    "Rematerialisation": "ops/overflow:"
    " the_routing_of_a_checkpointed_block_is_exchanged_once;"
    " moe/programs: experts_are_chosen_once",
    "Export": "ops/transformations: exported",
    "`vmap`": "moe/layer: vmap_of_any_number_of_examples",
    "The same bits everywhere": "moe/bits:"
    " training_has_the_same_bits_on_meshes_and_in_views",
    "`psum_scatter` between processes on the CPU": "moe/fsdp:"
    " no_gradient_is_scattered, gradients_are_right_under_load",
    "A loop around layers, with collectives beside it, on CPUs": "ops/hlo:"
    " a_loop_orders_only_collectives_that_need_its_results",
    "Hidden collectives": "ops/hlo: forward_and_backward,"
    " other_collectives_are_named",
  },
}


@pytest.mark.parametrize("page", PROMISES)
def test_each_heading_is_in_the_table(page):
  text = (_ROOT / "docs" / f"{page}.md").read_text()
  assert re.findall(r"^##+ (.*)$", text, re.M) == [*PROMISES[page]]


@pytest.mark.parametrize("page", PROMISES)
def test_each_test_in_the_table_exists(page):
  for heading, tests in PROMISES[page].items():
    for of_file in filter(None, tests.split("; ")):
      file, names = of_file.split(": ")
      text = (_ROOT / "tests" / f"{file}_test.py").read_text()
      for name in names.split(", "):
        assert f"\ndef test_{name}(" in text, (heading, file, name)
