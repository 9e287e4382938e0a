# SPDX-License-Identifier: Apache-2.0
"""If the programs of the ranks differ, every rank reports the difference.

The last process differs from all others, which run the same program.
"""

import concurrent.futures
import functools

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np
import pytest

from cases import Case
from conftest import make_mesh, to_global
import ep
from ep._src.base import compat
from ep._src.group import rendezvous
from groups import bootstrap, E, not_with_xla
from op_functions import dispatch, sizes

pytestmark = [
  not_with_xla("XLA's collectives do not compare programs"),
  pytest.mark.skipif(
    jax.process_count() == 1, reason="one process runs one program"
  ),
]

RANKS = jax.process_count()
ODD = jax.process_index() == RANKS - 1
LAST = f"rank {RANKS - 1}"
SHORT_TIMEOUT_S = 3.0  # for groups in which a rank never joins an op


def either(odd, others):
  return odd if ODD else others


@pytest.fixture(scope="module")
def group():
  """Makes a group for several tests; `ep_finalize` must succeed after them."""
  with bootstrap(make_mesh({"ep": RANKS})) as group:
    yield group


@pytest.fixture
def make_layer(group, request):
  """Returns a function that makes layers whose programs no other test runs."""
  return functools.partial(ep.EpLayerConfig, group, name=request.node.name)


def expect_words(message, *words):
  for word in words:
    assert word in message, message


def check_works(group):
  Case(ep.EpLayerConfig(group)).check_round_trip()


def expect_disagreement(group, fn, *words):
  """Checks that `fn` fails on every rank, once and without a timeout."""
  with pytest.raises(ep.EpError) as error:
    jax.block_until_ready(fn())
  expect_words(str(error.value), "the ranks disagree on ", *words)
  check_works(group)


@pytest.mark.parametrize(
  "option, odd, others, words",
  [
    ("top_k", 2, 3, ["top_k: 3 on rank 0", f"2 on {LAST}"]),
    ("recv_capacity_per_rank", 40, 44, ["capacity: 44 on rank 0", "40 on "]),
    ("overflow", "drop", "error", ["overflow: error on rank 0", "drop on "]),
    ("tail", "unspecified", "zero", ["tail: zero on rank 0", "unspecified on"]),
    ("wire", "mxfp8", None, ["wire: None on rank 0", "mxfp8 on rank"]),
    ("name", "moe_4", "moe_3", ['(layer "moe_3")', '(layer "moe_4")']),
  ],
)
def test_other_layers(group, make_layer, option, odd, others, words):
  case = Case(make_layer(**{option: either(odd, others)}))
  expect_disagreement(group, lambda: case.run(sizes), *words)


@pytest.mark.parametrize(
  "option, odd, others, words",
  [
    ("lead", (4,), (5,), ["tokens per rank: 5 on rank 0", f"4 on {LAST}"]),
    ("hidden", 6, 7, ["hidden size: 7 on rank 0", f"6 on {LAST}"]),
    (
      "dtype",
      jnp.bfloat16,
      jnp.float32,
      ["dtype: float32 on rank 0", f"bfloat16 on {LAST}"],
    ),
  ],
)
def test_other_tokens(group, make_layer, option, odd, others, words):
  options = {option: either(odd, others)}
  dtype = options.pop("dtype", jnp.float32)
  case = Case(make_layer(), **options)
  arrays = case.tokens(dtype), case.weights()
  expect_disagreement(group, lambda: case.run(dispatch, *arrays), *words)


def test_the_store_keeps_the_last_meeting_alone():
  """A meeting deletes the folders of all earlier ones, failed ones included."""
  mesh = make_mesh({"ep": RANKS})
  for _ in range(2):
    with pytest.raises(ValueError, match="max_tokens_per_rank = 2 on process"):
      bootstrap(mesh, max_tokens_per_rank=either(3, 2))
  ep.ep_finalize(bootstrap(mesh))
  keys = compat.distributed_client().key_value_dir_get("ep/join/")
  multihost_utils.sync_global_devices("before the meeting of the next test")
  folders = {key.rpartition("/digest/")[0] for key, _ in keys}
  assert jax.process_index() > 0 or len(folders - {""}) == 1, folders


def test_a_wrong_size_of_a_group_that_is_resized(group):
  error_type = (ValueError, RuntimeError)
  with pytest.raises(error_type, match="^ep_resize: ") as error:
    ep.ep_resize(group, max_tokens_per_rank=either(0, 9))
  expect_words(str(error.value), "max_tokens_per_rank = 0, but it must be")
  check_works(group)


@pytest.mark.parametrize("equal_counts", [False, True])
def test_a_handle_of_another_routing(group, make_layer, equal_counts):
  """Ranks detect that one rank uses the handle of the previous step."""
  layer = make_layer()
  cases = [Case(layer, routing) for routing in ["uniform", "skewed"]]
  if equal_counts:  # Swap two tokens of each rank.
    choices = cases[0].topk_idx.reshape(RANKS, -1, layer.top_k)
    swapped = choices[:, [1, 0, *range(2, choices.shape[1])]]
    cases[1] = Case(layer, swapped.reshape(cases[0].topk_idx.shape))
  old, new = (
    jax.block_until_ready(ep.ep_prepare(layer, case.put(case.topk_idx)))
    for case in cases
  )
  arrays = map(cases[0].put, (cases[0].tokens(), cases[0].weights()))
  words = ["the routing", "on rank 0", f"on {LAST}"]
  expect_disagreement(
    group, lambda: ep.ep_dispatch(either(old, new), *arrays), *words
  )


def test_other_ranks_of_experts(group):
  experts = np.roll(np.arange(E), either(E // 2, 0))
  ids = to_global(np.arange(E), group.mesh, jax.P("ep"))
  with pytest.raises(ep.EpError, match="recv_sizes must agree"):
    new = ep.Placement(experts)
    jax.block_until_ready(
      ep.moe.move(group, ids, jax.P("ep"), old=None, new=new)
    )
  check_works(group)


# --- Ranks wait in vain -------------------------------------------------------


class Waits:
  """Programs in which ranks wait for each other until `timeout_s`.

  Each method compiles a program for a new group, and returns a function that
  runs it. All of them run at the same time. `errors` has their errors on this
  rank.
  """

  ALL = "one_call_fewer", "other_programs", "compiled"

  def __init__(self):
    self.errors, runs = {}, {}
    make = functools.partial(bootstrap, timeout_s=SHORT_TIMEOUT_S)
    groups = {name: make(make_mesh({"ep": RANKS})) for name in self.ALL}
    for name, group in groups.items():
      case = Case(ep.EpLayerConfig(group, name="moe_3"))
      runs[name] = getattr(self, name)(case)
    with concurrent.futures.ThreadPoolExecutor(len(runs)) as pool:
      list(pool.map(self.note_error, runs, runs.values()))
    # If one rank closed a group now, the other ranks would report the closing.
    multihost_utils.sync_global_devices("timeout")
    if ODD:
      group = groups.pop("one_call_fewer")
      self.note_error("one_call_fewer", lambda: ep.ep_finalize(group))
    for group in groups.values():
      ep.ep_finalize(group)

  def note_error(self, name, run):
    try:
      jax.block_until_ready(run())
    except ep.EpError as e:
      self.errors[name] = str(e)

  def compile(self, fn, case):
    ids = case.put(case.topk_idx)
    return functools.partial(jax.jit(fn).lower(ids).compile(), ids)

  def one_call_fewer(self, case):
    step = self.compile(
      lambda x: ep.ep_prepare(case.layer, x).group_sizes, case
    )
    for _ in range(2):
      jax.block_until_ready(step())
    return (lambda: None) if ODD else step

  def other_programs(self, case):
    def train(x):
      return ep.ep_prepare(case.layer, x).group_sizes

    def evaluate(x):
      return ep.ep_prepare(case.layer, x).token_counts

    return self.compile(either(evaluate, train), case)

  def compiled(self, case):
    """One process compiles a program again, and the others do not."""
    topk_idx = case.put(case.topk_idx)
    step = jax.jit(lambda x: ep.ep_prepare(case.layer, x).group_sizes)
    options = {"xla_backend_optimization_level": 0}
    if ODD:
      step.lower(topk_idx).compile(compiler_options=options)
    return functools.partial(step.lower(topk_idx).compile(), topk_idx)


@pytest.fixture(scope="module")
def waits():
  return Waits()


_WAITED = f"waited timeout_s = {SHORT_TIMEOUT_S:g} s for "


def test_one_call_fewer(waits):
  error = waits.errors["one_call_fewer"]
  if ODD:
    words = "ep_finalize", "rank 0", '(layer "moe_3"), step 2 of', "equally"
    return expect_words(error, *words)
  missing = f"rank {RANKS - 1} (process {RANKS - 1}) whose last op was"
  layers = '(layer "moe_3"), step 2 of', '(layer "moe_3"), step 1 of'
  expect_words(error, _WAITED, missing, *layers)


def test_other_programs(waits):
  words = "jit_train", "jit_evaluate"
  expect_words(waits.errors["other_programs"], _WAITED, *words)


def test_another_number_of_compilations(waits):
  words = "another copy", "compile it alike", "moe_3"
  expect_words(waits.errors["compiled"], _WAITED, *words)


# --- Bootstraps ---------------------------------------------------------------


def expect_no_bootstrap(*words, **options):
  with pytest.raises((ValueError, RuntimeError)) as error:
    bootstrap(make_mesh({"ep": RANKS}), **options)
  expect_words(str(error.value), "ep_bootstrap", *words)
  return str(error.value)


def test_other_arguments():
  expect_no_bootstrap("hidden_dim", "7", "8", hidden_dim=either(8, 7))


@pytest.mark.parametrize(
  "odd, others",
  [
    ("--xla_a=1 --xla_b=2", "--xla_a=1"),
    ("--xla_a=2 --xla_a=1", "--xla_a=2"),
    ("", "--xla_a=1"),
  ],
)
def test_other_flags_of_xla(monkeypatch, odd, others):
  count = f"--xla_force_host_platform_device_count={1 + ODD}"
  # Scripts that append to XLA_FLAGS may leave a leading space.
  monkeypatch.setenv("XLA_FLAGS", f" {count} {either(odd, others)}")
  error = expect_no_bootstrap("XLA_FLAGS = ", "--xla_a=1", "same options")
  assert "device_count" not in error


def test_other_options_of_jax(monkeypatch):
  with jax.default_matmul_precision("highest"):
    monkeypatch.setenv("XLA_FLAGS", either("--xla_dump_to=/x", ""))
    ep.ep_finalize(bootstrap(make_mesh({"ep": RANKS})))
  level = jax.config.jax_optimization_level
  jax.config.update("jax_optimization_level", either("O1", level))
  try:
    expect_no_bootstrap("jax_optimization_level = ", "O1", "same options")
  finally:
    jax.config.update("jax_optimization_level", level)


@pytest.mark.parametrize(
  "name", ["the version of jax", "the digest of the ep package"]
)
def test_other_versions(monkeypatch, name):
  if ODD:
    theirs = rendezvous.versions("host") | {name: "another"}
    monkeypatch.setattr(rendezvous, "versions", lambda _: theirs)
  expect_no_bootstrap(f"{name} = ", "another", "same versions")
