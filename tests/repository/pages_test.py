# SPDX-License-Identifier: Apache-2.0
"""The Python blocks of the pages run as they stand there.

A page is one program: its blocks share their names, from top to bottom. What a
block prints stands in a block of text right after it, or in its comments. Two
marks, which readers see, leave code out: a block whose first line says "# Not
run", and a paragraph of a block with "# don't". All code must parse, and each
name of ep in it must exist.
"""

import ast
import contextlib
import copy
import functools
import operator
import pathlib
import pickle
import re
from typing import NamedTuple

import jax
from jax import export, lax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
import pytest

from docs.site import pictures
import ep
import ep.launch

_ROOT = pathlib.Path(__file__).parents[2]
_PAGES = sorted(
  str(path.relative_to(_ROOT))
  for path in [*_ROOT.glob("*.md"), *_ROOT.glob("docs/**/*.md")]
)
# Readers must see what a block is; MyST has further kinds.
_FENCED = re.compile(
  r"^```(.*?)\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.M | re.S
)
_LANGUAGES = {"python", "sh", "starlark", "text", "yaml"}


class Block(NamedTuple):
  line: int
  language: str
  code: str
  output: str | None  # the block of text right after it


def _blocks(page: str) -> list[Block]:
  text = (_ROOT / page).read_text()
  return [
    Block(text.count("\n", 0, match.start(2)), *match.groups())
    for match in _FENCED.finditer(text)
  ]


def _python(page: str) -> list[Block]:
  return [block for block in _blocks(page) if block.language == "python"]


def _what_runs(code: str) -> str:
  """Returns the code without what is marked, on the same lines."""
  if code.startswith("# Not run"):
    return ""
  paragraphs = re.split(r"(\n\n+)", code)
  return "".join(
    "\n" * part.count("\n") if "# don't" in part else part
    for part in paragraphs
  )


def _given() -> dict:
  """Returns the names that fragments assume: of imports and a small step."""
  mesh = jax.make_mesh((2, 2), ("dp", "ep"), axis_types=(AxisType.Auto,) * 2)
  sizes = dict(num_experts=8, top_k=2)
  group = ep.ep_bootstrap(mesh, **sizes)
  layer = ep.EpLayerConfig(group)
  model = dict(hidden=32, inner=32, num_experts=8, top_k=2)
  cfg = ep.MoEConfig(**model)
  x = jax.random.normal(jax.random.key(0), (64, 32))
  logits = jax.random.normal(jax.random.key(1), (64, 8))
  topk_idx, topk_weights = ep.route_topk(logits, 2)
  matrices = dict(w_up=jnp.ones((8, 32, 16)), w_down=jnp.ones((8, 16, 32)))

  @jax.jit
  def step(state, batch):
    out = ep.moe_layer(layer, batch, topk_idx, topk_weights, **matrices)
    return state + out

  return dict(
    AxisType=AxisType,
    Mesh=Mesh,
    P=P,
    copy=copy,
    ep=ep,
    export=export,
    functools=functools,
    grouped_matmul=jax.vmap(ep.grouped_matmul, (0, None, 0)),  # over ranks
    jax=jax,
    jnp=jnp,
    lax=lax,
    pickle=pickle,
    # A step of training, and its arguments.
    args=(x, x),
    batch=x,
    block=lambda x: ep.moe_layer(layer, x, topk_idx, topk_weights, **matrices),
    data=[x],
    eval_step=lambda state: state,
    state=x,
    step=step,
    # A layer, and its arguments.
    cfg=cfg,
    group=group,
    layer=layer,
    logits=logits,
    matrices=matrices,
    mesh=mesh,
    model=model,
    params=ep.moe.init(jax.random.key(2), cfg),
    sizes=sizes,
    top_k=2,
    topk_idx=topk_idx,
    topk_weights=topk_weights,
    w_up=matrices["w_up"][:4],  # a rank's
    x=x,
    xs=x.reshape(4, 16, 32),
    # Something to map over the ranks.
    f=lambda x: x,
    specs=dict(in_specs=P(("dp", "ep")), out_specs=P(("dp", "ep"))),
  )


def _routed(names: dict) -> dict:
  """Returns a routing of these names, and what the ops make of it."""
  handle = ep.ep_prepare(names["layer"], names["topk_idx"])
  rows, weights = ep.ep_dispatch(handle, names["x"], names["topk_weights"])
  return dict(
    handle=handle,
    rows=rows,
    row_weights=weights,
    w=weights,
    tokens=names["x"],
    grad_out=names["x"],
  )


# These pages have fragments, each of which stands for itself; the others state
# whatever they use.
_FRAGMENTS = {
  "docs/architecture.md",
  "docs/performance.md",
  "docs/router.md",
  "docs/semantics.md",
  "docs/sharp_bits.md",
}
_LAUNCHED = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
_NEEDS_ROUTING = re.compile(r"\b(handle|rows)\b")


@pytest.mark.parametrize("page", [p for p in _PAGES if _python(p)])
def test_the_code_of_a_page(page, capsys, tmp_path, monkeypatch):
  """It runs, and prints what the page says."""
  monkeypatch.chdir(tmp_path)
  for name in _LAUNCHED:  # readers start a page's program by itself
    monkeypatch.delenv(name, raising=False)
  names = {"__name__": "page"}
  groups = set()
  for block in _python(page):
    code = _what_runs(block.code)
    if page in _FRAGMENTS:
      names |= _given()
      if _NEEDS_ROUTING.search(code):
        names |= _routed(names)
    capsys.readouterr()
    exec(compile("\n" * block.line + code, page, "exec"), names)
    printed = capsys.readouterr().out
    if block.output:
      assert printed == block.output
    elif page not in _FRAGMENTS:
      assert all(f"  # {line}\n" in code for line in printed.splitlines())
    groups |= {v for v in names.values() if isinstance(v, ep.EpGroup)}
    # Where a program waits in a collective of XLA for one whose group was
    # closed, XLA ends the process after a while.
    with contextlib.suppress(*ep.EpError):
      jax.block_until_ready(jax.live_arrays())
  for group in groups:
    ep.ep_finalize(group)


@pytest.mark.parametrize("page", _PAGES)
def test_readers_see_what_a_block_is(page):
  """Each block has a language; Python parses, and its names of ep exist."""
  for block in _blocks(page):
    where = f"{page}:{block.line}"
    assert block.language in _LANGUAGES, where
    if block.language == "python":
      for node in ast.walk(ast.parse(block.code)):
        name = isinstance(node, ast.Attribute) and ast.unparse(node)
        if name and re.fullmatch(r"ep(\.\w+)+", name):
          assert operator.attrgetter(name[3:])(ep), where
  if page.startswith("docs/"):
    prose = _FENCED.sub("", (_ROOT / page).read_text())
    assert not re.search(r"^\n {4}", prose, re.M), f"{page}: an indented block"


# Commands of the pages, and where they run, or why no test runs them as they
# stand. The first pattern that matches counts.
_COMMANDS = {
  r"python -m ep": "wheel_test runs it",
  r"python examples/dry_run\.py": "dry_run_test runs it",
  r"python examples/\w+\.py": "wheel_test runs it, with small sizes",
  r".*JAX_PLATFORMS=cuda .*|.*gpu_first_contact.*": "it needs GPUs",
  r"\./bazelw run //examples:.*": (
    "example_test and train_run_test start the programs without Bazel, which"
    " does not run in its own tests"
  ),
  r"\./bazelw run //benchmarks:ep_bench .*": (
    "bench_test and layer_bench_test run it with small sizes"
  ),
  r"(\./bazelw run //|taskset -c 0 bazel-bin/)benchmarks.*": (
    "its figures are for an idle machine"
  ),
  r"\./bazelw (build|test) .*|tools/format\.sh": (
    ".ci/run runs or builds the same, but for sanitizers, GPUs and long runs"
  ),
  r"pip install .*|python3 -m venv .*|cd ~": (
    "wheel_test and extras_test install the wheels without an index"
  ),
  r"srun .*|mpirun .*": "launch_test sets the variables that these set",
  r".*\btrain\.py.*|.* pytest tests": "the program is the reader's",
  r"python -m .*pytest .*tests/.*": "Bazel runs the test, for less long",
  r"(export )?[A-Z_]+=\S+.*|mkdir .*": "it prepares the commands after it",
}


def test_each_command_runs_or_has_a_reason():
  commands = {
    re.sub(r"\s+#.*", "", line)
    for page in _PAGES
    for block in _blocks(page)
    if block.language == "sh"
    for line in block.code.replace("\\\n", "").splitlines()
    if line
  }
  found = {
    command: next((p for p in _COMMANDS if re.fullmatch(p, command)), None)
    for command in commands
  }
  assert None not in found.values(), found
  assert set(found.values()) == set(_COMMANDS)


def _public(module) -> set[str]:
  """Returns the public names that a module defines."""
  own = getattr(module, "__all__", None) or [
    name
    for name, value in vars(module).items()
    if not name.startswith("_")
    and (name.isupper() or getattr(value, "__module__", "") == module.__name__)
  ]
  return {f"{module.__name__}.{name}" for name in own}


def test_the_reference_has_every_public_name():
  """It names the file of each, where the docstring is."""
  modules = [ep, ep.moe, ep.presets, ep.launch, ep.lax, ep.debug, ep.testing]
  public = set().union(*map(_public, modules))
  public -= {module.__name__ for module in modules} | {"ep.launch.main"}
  listed = set()
  for page in _ROOT.glob("docs/reference/*.md"):
    for name, file in re.findall(
      r"^\* \[`(.*)`\]\((.*)\)$", page.read_text(), re.M
    ):
      last = name.rpartition(".")[2]
      source = (page.parent / file).read_text()
      assert re.search(rf"^\s*(def |class )?{last}\b", source, re.M), name
      listed.add(name)
  assert public <= listed
  for name in listed:
    assert operator.attrgetter(name[3:])(ep) is not None


def test_each_picture_is_what_its_command_draws():
  for name, draw in pictures.PICTURES.items():
    assert (_ROOT / "docs/images" / name).read_text() == str(draw()), (
      f"{name} is old; run ./bazelw run //docs:pictures"
    )
