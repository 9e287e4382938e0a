# SPDX-License-Identifier: Apache-2.0
"""Code on the documentation pages computes the values that the pages show."""

import ast
import pathlib
import re
import textwrap

import jax
import numpy as np

from conftest import assert_shards_equal, make_mesh, to_global
import ep
from ep import launch
from ep._src.backends.nccl import environment
from groups import bootstrap
import programs

_ROOT = pathlib.Path(__file__).parents[2]


def _section(path, title):
  """Returns the text below a title of level two."""
  text = (_ROOT / path).read_text()
  return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def _example(path, title):
  """Returns the Python block of a section."""
  return re.search(r"```python\n(.*?)```", _section(path, title), re.DOTALL)[1]


def test_programs_of_the_pages_under_the_launcher(tmp_path):
  """All programs exit with code 0, even a program that waits for no result."""
  first = _example("docs/tutorial.md", "Twenty lines")
  second = _example("README.md", "The layer")
  code = f"{first}\ndef main():\n{textwrap.indent(second, '  ')}\nmain()\n"
  # Gloo's threads write into the middle of lines of stdout.
  own_file = f"""import os, sys
path = f"{tmp_path}/output_{{os.getpid()}}"
sys.stdout = sys.stderr = open(path, "w")
"""
  assert not launch.launch(
    ["-c", own_file + code],
    num_processes=2,
    devices_per_process=2,
    timeout_s=100,
    log_dir=tmp_path,
  )
  promised = [
    lines.splitlines()[-1].partition("  # ")[2] for lines in (first, second)
  ]
  outputs = [
    path.read_text().splitlines() for path in tmp_path.glob("output_*")
  ]
  assert outputs == [promised] * 2


def test_pytest_under_the_launcher(tmp_path, monkeypatch):
  """With the page's conftest.py, the page's test passes in two processes."""
  text = _section("docs/howto/without_accelerators.md", "Several processes")
  blocks = re.findall(r"```\w+\n(.*?)```", text, re.DOTALL)
  conftest, test, commands = blocks
  tests = tmp_path / "tests"
  tests.mkdir()
  (tests / "conftest.py").write_text(conftest)
  (tests / "round_trip_test.py").write_text(test)
  monkeypatch.chdir(tmp_path)
  assert len(conftest.splitlines()) == 3
  (command,) = re.findall("python (.*num_processes=2.*)", commands)
  code, output = programs.run(*command.split())
  assert code == 0, output
  assert "1 passed" in output


def _python(path):
  """Returns all Python blocks of a page."""
  text = (_ROOT / path).read_text()
  return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


def test_a_killed_program_continues_on_fewer_ranks(tmp_path, monkeypatch):
  """Kills a rank of the page's program; three ranks do not divide 8 experts."""
  program = _python("docs/howto/failures.md")
  unbroken = tmp_path / "unbroken"
  unbroken.mkdir()
  monkeypatch.chdir(unbroken)
  names = {"__name__": "page"}
  exec(program, names)

  def run(code, processes, devices):
    return launch.launch(
      ["-c", code],
      num_processes=processes,
      devices_per_process=devices,
      timeout_s=200,
      log_dir=tmp_path / "logs",
    )

  monkeypatch.chdir(tmp_path)
  loop = "  train, loss = train_step("
  kill = f"""  if step == 17 and jax.process_index() == 1:
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
{loop}"""
  assert program.count(loop) == 1
  assert run(program.replace(loop, kill), 2, 2) != 0
  note = "pathlib.Path('losses').write_text(repr(losses))\n"
  assert run(program + note, 1, 3) == 0
  losses = ast.literal_eval((tmp_path / "losses").read_text())
  # The save of step 15 waited until the save of step 10 was complete.
  assert min(losses) in (11, 16) and max(losses) == 30
  for step, loss in losses.items():
    assert abs(loss - names["losses"][step]) < 1e-5


def _value(cell):
  try:
    return ast.literal_eval(cell)
  except (SyntaxError, ValueError):
    return cell


def _tables(text):
  """Yields the columns of each table, by name."""
  for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
    head, _, *rows = [
      [cell.strip().strip("`") for cell in line.strip("|\n").split("|")]
      for line in table.splitlines()
    ]
    columns = zip(*(map(_value, row) for row in rows), strict=True)
    yield dict(zip(head, columns, strict=True))


def test_the_variables_of_nccl_ep():
  """The page's table has the variables that the code refuses or passes on."""
  section = _section("docs/gpu.md", "Environment variables")
  _, _, *rows = re.findall(r"^\|(.*?)\|", section, re.MULTILINE)
  groups = environment.REFUSED, environment.AGREED, environment.PASSED_ON
  assert [re.findall(r"`(\w*NCCL_\w+)`", row) for row in rows] == [
    list(variables) for variables in groups
  ]


def test_the_worked_example():
  """The ops compute every array that the page shows, in two equal domains."""
  text = _section("docs/semantics.md", "A worked example")
  given, slots, results = _tables(text)
  mesh = make_mesh({"dp": 2, "ep": 2})
  capacity = int(re.search(r"capacity\s(\d+)", text)[1])

  def of_all(array, dtype=np.float32):
    """Returns the array of both domains, given one domain's array."""
    array = np.asarray(array, dtype)
    return np.concatenate([array, array])

  def as_slots(column, default=0.0):
    """Returns a column as slots [P, C, ...]; unused slots have the default."""
    out = np.full((2, capacity, *np.shape(slots[column][0])), default)
    for rank, slot, value in zip(
      slots["rank"], slots["slot"], slots[column], strict=True
    ):
      out[rank, slot] = value
    return of_all(out)

  def count(name, dropping=False):
    """Returns the counts `name` on the page: of both ranks, or with drops."""
    found = [
      ast.literal_eval(value)
      for value in re.findall(rf"{name} (\[.*?\])", text)
    ]
    return found[2] if dropping else found[:2]

  slots["factor"] = [e + 1 if e != "padding" else 1 for e in slots["expert"]]
  tokens, weights, cotangents, factor, idx = (
    to_global(array, mesh, jax.P(("dp", "ep")))
    for array in (
      of_all(given["token"]),
      of_all(given["topk_weights"]),
      of_all(results["G"]),
      as_slots("factor", 1.0)[..., None],
      of_all(given["topk_idx"], np.int32),
    )
  )
  sizes = dict(num_experts=4, max_tokens_per_rank=2, hidden_dim=2, top_k=2)
  with bootstrap(mesh, alignment=2, **sizes) as group:
    layer = ep.EpLayerConfig(group)
    assert layer.capacity == capacity

    @jax.jit
    def run(tokens, weights, cotangents, factor, idx):
      handle = ep.ep_prepare(layer, idx)

      def dispatch(tokens, weights):
        return ep.ep_dispatch(handle, tokens, weights)

      def combine(outputs, weights):
        return ep.ep_combine(handle, outputs, weights)

      (rows, row_weights), undo = jax.vjp(dispatch, tokens, weights)
      outputs = rows * factor
      out, unsum = jax.vjp(combine, outputs, row_weights)
      grad_outputs, grad_row_weights = unsum(cotangents)
      grad_tokens, grad_weights = undo(
        (grad_outputs * factor, grad_row_weights)
      )
      return {
        "recv_tokens": rows,
        "weight": row_weights,
        "its output": outputs,
        "grad_expert_out": grad_outputs,
        "grad_weights": grad_row_weights,
        "combine(Z)": ep.ep_combine(handle, outputs),
        "combine(Z, weights)": out,
        "grad_tokens": grad_tokens,
        "grad_topk_weights": grad_weights,
        "group_sizes": handle.group_sizes,
        "token_counts": handle.token_counts,
        "dropped_counts": handle.dropped_counts,
        "total_recv_tokens": handle.total_recv_tokens,
        "max_recv_tokens": handle.max_recv_tokens,
      }

    for name, actual in run(tokens, weights, cotangents, factor, idx).items():
      if name in slots:
        expected = as_slots(name)
      elif name in results:
        expected = of_all(results[name])
      else:
        expected = of_all(count(name), np.int32)
      assert_shards_equal(actual, expected)

    layer = ep.EpLayerConfig(
      group, recv_capacity_per_rank=4, overflow="drop", name="dropping"
    )
    handle = jax.jit(lambda idx: ep.ep_prepare(layer, idx))(idx)
    for name in (
      "group_sizes",
      "token_counts",
      "dropped_counts",
      "total_recv_tokens",
      "max_recv_tokens",
    ):
      for shard in getattr(handle, name).addressable_shards:
        if shard.index[0].start % 2 == 0:  # rank 0 of a domain
          np.testing.assert_array_equal(shard.data[0], count(name, True))
    kept = [[True, True], [True, True], [True, False], [True, False]]
    assert_shards_equal(handle.kept, of_all(kept, bool))
