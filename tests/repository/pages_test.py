# SPDX-License-Identifier: Apache-2.0
"""Runs the Python blocks of the pages.

A page is one program: its blocks share their names, from top to bottom. A text
block right after a block, or comments in the block, show its output. The tests
skip a block whose first line says "# Not run", and a paragraph with "# don't".
All code must parse, and each name of ep in it must exist.
"""

import ast
import contextlib
import operator
import pathlib
import re
from typing import NamedTuple

import jax
import pytest

import ep
import ep.launch
import programs

_ROOT = pathlib.Path(__file__).parents[2]
_PAGES = sorted(
  str(path.relative_to(_ROOT))
  for path in [*_ROOT.glob("*.md"), *_ROOT.glob("docs/**/*.md")]
)
# Matches a block of any language, and the text block right after the block.
_FENCED = re.compile(
  r"^```(.*?)\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.M | re.S
)
_LANGUAGES = {"python", "sh", "starlark", "text", "yaml"}


class Block(NamedTuple):
  line: int
  language: str
  code: str
  output: str | None  # the text block right after this block


def _blocks(page: str) -> list[Block]:
  text = (_ROOT / page).read_text()
  return [
    Block(text.count("\n", 0, match.start(2)), *match.groups())
    for match in _FENCED.finditer(text)
  ]


def _python(page: str) -> list[Block]:
  return [block for block in _blocks(page) if block.language == "python"]


def _runnable(code: str) -> str:
  """Returns the code without the skipped parts, on the same lines."""
  if code.startswith("# Not run"):
    return ""
  paragraphs = re.split(r"(\n\n+)", code)
  return "".join(
    "\n" * part.count("\n") if "# don't" in part else part
    for part in paragraphs
  )


# Defines names that pages in _FRAGMENTS use: a group, a layer, a training step.
_GIVEN = """
import functools
import jax
from jax import export, lax, numpy as jnp
from jax.sharding import AxisType, Mesh
import ep

mesh = jax.make_mesh((2, 2), ("dp", "ep"), axis_types=(AxisType.Auto,) * 2)
sizes = dict(num_experts=8, top_k=2)
model = dict(hidden=32, inner=32, **sizes)
cfg = ep.MoEConfig(**model)
group = ep.ep_bootstrap(mesh, **sizes)
layer = ep.EpLayerConfig(group)
x = tokens = grad_out = state = jax.random.normal(jax.random.key(0), (64, 32))
args, data, xs = (x, x), [x], x.reshape(4, 16, 32)
logits = jax.random.normal(jax.random.key(1), (64, 8))
topk_idx, topk_weights = ep.route_topk(logits, 2)
handle = ep.ep_prepare(layer, topk_idx)
rows, row_weights = ep.ep_dispatch(handle, x, topk_weights)
params = ep.moe.init(jax.random.key(2), cfg)
matrices = dict(w_up=jnp.ones((8, 32, 16)), w_down=jnp.ones((8, 16, 32)))
w, w_up = row_weights, matrices["w_up"][:4]  # a rank's
eval_step = lambda x: x
grouped_matmul = jax.vmap(ep.grouped_matmul, (0, None, 0))  # over ranks
block = lambda x: ep.moe_layer(layer, x, topk_idx, topk_weights, **matrices)
step = jax.jit(lambda state, batch: state + block(batch))
"""
# Pages with code that needs names from _GIVEN. Other pages are whole programs.
_FRAGMENTS = {f"docs/{page}.md" for page in ("architecture", "sharp_bits")}
_LAUNCHED = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"


@pytest.fixture(scope="module")
def given():
  """Yields a dict from names to values, which executing _GIVEN fills."""
  names = {}
  yield names
  if names:
    ep.ep_finalize(names["group"])


@pytest.mark.parametrize("page", [p for p in _PAGES if _python(p)])
def test_the_code_of_a_page(page, given, capsys, tmp_path, monkeypatch):
  """The code runs, and prints the output that the page shows."""
  monkeypatch.chdir(tmp_path)
  for name in _LAUNCHED:  # Readers run a page without a launcher.
    monkeypatch.delenv(name, raising=False)
  names = {"__name__": "page"}
  groups = set()
  for block in _python(page):
    code = _runnable(block.code)
    if page in _FRAGMENTS:
      if not given or not given["group"].connection.is_open:
        exec(_GIVEN, given)
      names |= given
    capsys.readouterr()
    exec(compile("\n" * block.line + code, page, "exec"), names)
    printed = capsys.readouterr().out
    if block.output:
      assert printed == block.output
    elif page not in _FRAGMENTS:
      assert all(f"  # {line}\n" in code for line in printed.splitlines())
    groups |= {v for v in names.values() if isinstance(v, ep.EpGroup)}
    # If the test closed a group now, XLA would terminate this process when a
    # program in an XLA collective waits for a program of this group.
    with contextlib.suppress(*ep.EpError):
      jax.block_until_ready(jax.live_arrays())
  for group in groups - {given.get("group")}:
    ep.ep_finalize(group)
  if (tmp_path / "checkpoints").exists():
    _check_resume(page, int(names["train"].step))


def _check_resume(page: str, step: int) -> None:
  """Checks that a new process on another mesh resumes from the checkpoint."""
  program = "\n".join(_runnable(block.code) for block in _python(page))
  assert program.count("fsdp=2, tp=1") == 1
  other = program.replace("fsdp=2, tp=1", "fsdp=1, tp=2")
  other += f"\nassert train.step == {2 * step}, train.step"
  code, output = programs.run("-c", other)
  assert code == 0, output


@pytest.mark.parametrize("page", _PAGES)
def test_the_blocks_of_a_page(page):
  """Each block has a language; Python code parses, and its ep.* names exist."""
  for block in _blocks(page):
    where = f"{page}:{block.line}"
    assert block.language in _LANGUAGES, where
    if block.language == "python":
      for node in ast.walk(ast.parse(block.code)):
        name = isinstance(node, ast.Attribute) and ast.unparse(node)
        if name and re.fullmatch(r"ep(\.\w+)+", name):
          assert operator.attrgetter(name[3:])(ep), where


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
  names = "moe presets launch lax quant testing"
  modules = [ep, *(getattr(ep, name) for name in names.split())]
  public = set().union(*map(_public, modules))
  public -= {module.__name__ for module in modules}
  pages = "".join(p.read_text() for p in _ROOT.glob("docs/reference/*.md"))
  listed = set(re.findall(r"^\* `(.*)`$", pages, re.M))
  assert public <= listed
  for name in listed:
    assert operator.attrgetter(name[3:])(ep) is not None
