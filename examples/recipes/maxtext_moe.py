# SPDX-License-Identifier: Apache-2.0
"""Prints a diff that lets MaxText exchange tokens with ep.

    python examples/recipes/maxtext_moe.py CHECKOUT | git -C CHECKOUT apply

Then MaxText's new option `jax_ep_backend` selects the exchange: "host" on CPUs
or "xla" on other devices, and "" for MaxText's own `ragged_all_to_all`.

The diff changes only the code between `permute` and `unpermute`, in three inner
functions of `RoutedMoE.sparse_matmul`. MaxText's router, losses, biases,
activations and parameters stay. `permute` repeats each token for its experts,
so each row of `permute` is a token of ep with one expert. With "host", ep also
computes matmuls without quantization: on CPUs, `ragged_dot` multiplies every
row of the buffer by the matrices of all local experts.

The program finds the places by name. It fails if MaxText has renamed something
that the new code uses, or if the changed functions do more than before.
"""

import ast
import difflib
import pathlib
import sys
from typing import Any

# The arguments that the new code reads or passes, of the functions that it is
# part of or calls.
_FUNCTIONS = {
  "ra2a_and_route": "x, num_ep, expert_shard_id",
  "unsort_output_and_ra2a": "intermediate_output, route_metadata,"
  " is_batch_sharded_by_expert",
  "jax_ragged_dot_gmm": "inputs, kernel, group_sizes",
  "get_ragged_buffer_size": "local_batch, ep_degree, global_experts, top_k,"
  " ragged_buffer_factor",
}

# The results of `permute` that the new code reads, as `ra2a_and_route` names
# them.
_PERMUTED = "x, sorted_selected_experts, weights, selected_experts"

_GROUP = '''\
  ep_handle: object = None  # The routing of `jax_ep_backend`.


@functools.cache
def _ep_group(mesh: Mesh, axis_name: str, num_experts: int, backend: str):
  """Connects the EP shards of a mesh, once for all layers and batch shapes."""
  import ep  # pylint: disable=import-outside-toplevel

  return ep.ep_bootstrap(
      mesh,
      axis_name=axis_name,
      data_axes=tuple(a for a in mesh.axis_names if a != axis_name),
      num_experts=num_experts,
      top_k=1,
      backend=backend,
  )
'''

_DISPATCH = """\
      ep_handle = None
      if num_ep > 1 and self.config.jax_ep_backend:
        import ep  # pylint: disable=import-outside-toplevel

        cfg, axis = self.config, self._expert_parallelism_name
        group = _ep_group(self.mesh, axis, cfg.num_experts, cfg.jax_ep_backend)
        rows, factor = x.shape[0], {factor}
        capacity = self.get_ragged_buffer_size(
            rows, num_ep, cfg.num_experts, cfg.num_experts_per_tok, factor
        )
        if not is_batch_sharded_by_expert:
          # All EP shards have the same rows; each sends every num_ep-th row.
          is_own = jnp.arange(rows) % num_ep == expert_shard_id
          selected_experts = jnp.where(is_own, selected_experts, -1)
          capacity = rows
        capacity = max(capacity, group.num_local_experts)
        policy = "drop" if factor > 0.0 else "error"
        layer = ep.EpLayerConfig(
            group, recv_capacity_per_rank=capacity, overflow=policy
        )
        row_weights = jnp.ravel(weights)[sorted_selected_experts][:, None]
        ep_handle = ep.ep_prepare(layer, selected_experts[:, None], row_weights)
        x, _ = ep.ep_dispatch(ep_handle, x, row_weights)
        group_sizes = ep_handle.group_sizes
        experts = jnp.arange(group_sizes.size)
        selected_experts = jnp.repeat(
            experts, group_sizes, total_repeat_length=x.shape[0]
        )
      elif num_ep > 1:
"""

_COMBINE = """\
      if route_metadata.ep_handle is not None:
        import ep  # pylint: disable=import-outside-toplevel

        output = ep.ep_combine(route_metadata.ep_handle, intermediate_output)
        if not is_batch_sharded_by_expert:
          output = jax.lax.psum(output, self._expert_parallelism_name)
        return output
"""

_MATMUL = """\
      if self.config.jax_ep_backend == "host" and not self.config.quantization:
        import ep  # pylint: disable=import-outside-toplevel

        return ep.grouped_matmul(inputs, kernel, group_sizes)
"""

_OPTION = """\
  jax_ep_backend: str = Field("", description='Use jax_ep: "host" or "xla".')
"""

_REFUSAL = """\
      if self.jax_ep_backend:
        if self.use_ring_of_experts or not self.sparse_matmul{or_te}:
          raise ValueError("jax_ep_backend needs sparse_matmul, and no ring.")
"""


def _only(found: list[Any], what: str) -> Any:
  """Returns the only element of `found`.

  Raises:
    ValueError: there is none, or more than one.
  """
  if len(found) != 1:
    raise ValueError(
      f"MaxText's code has {len(found)} places with {what}, but this program"
      " needs exactly one. docs/howto/replace.md names the releases of"
      " MaxText that it was tested with."
    )
  return found[0]


def _nodes(tree: ast.AST, kind: type[ast.AST], text: str) -> list[Any]:
  """Returns the nodes of `kind` that begin with `text`, below decorators."""
  nodes = (n for n in ast.walk(tree) if isinstance(n, kind))
  return [n for n in nodes if f"\n{text}" in f"\n{ast.unparse(n)}"]


def _function(tree: ast.AST, name: str) -> ast.FunctionDef:
  """Returns the only function of a name, which has the needed arguments."""
  needed = _FUNCTIONS[name].split(", ")
  found = [
    function
    for function in _nodes(tree, ast.FunctionDef, f"def {name}(")
    if {*needed} <= {a.arg for a in function.args.args}
  ]
  return _only(found, f"a function {name} of {_FUNCTIONS[name]}")


def _check_steps(route: ast.FunctionDef) -> None:
  """Refuses a release that does more than permute, exchange, return.

  The new code would leave out what a release does besides, in silence.
  """
  steps = [s for s in route.body if not isinstance(s, ast.Assign | ast.Return)]
  _only(steps, "a step of ra2a_and_route besides assignments")
  _only(_nodes(route, ast.Return, ""), "a result of ra2a_and_route")
  names = set()
  for target in _nodes(route, ast.Assign, ""):
    if ast.unparse(target.value).startswith("self.permute("):
      names |= {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
  found = [names] if {*_PERMUTED.split(", ")} <= names else []
  _only(found, f"{_PERMUTED} from self.permute in ra2a_and_route")


def moe(tree: ast.Module) -> list[tuple[int, int, str]]:
  """Returns the edits of layers/moe.py: lines [first, last) become a text."""
  route, back, matmul, _ = (_function(tree, name) for name in _FUNCTIONS)
  _check_steps(route)
  metadata = _only(
    _nodes(tree, ast.ClassDef, "class RouteMetadata:"), "class RouteMetadata"
  )
  exchange = _only(
    _nodes(route, ast.If, "if num_ep > 1:"), "if num_ep > 1"
  ).lineno
  result = _only(_nodes(route, ast.Call, "RouteMetadata("), "RouteMetadata(")
  first, of_matmul = (f.body[1].lineno - 1 for f in (back, matmul))
  # From 0.2.5 on, a training step and an evaluation have different factors.
  method = "def get_ragged_buffer_factor(self):"
  has_method = _nodes(tree, ast.FunctionDef, method)
  factor = "self.get_ragged_buffer_factor()"
  factor = factor if has_method else "cfg.ragged_buffer_factor"
  handle = "              ep_handle=ep_handle,\n"
  end, last = metadata.end_lineno, result.keywords[-1].end_lineno
  return [
    (of_matmul, of_matmul, _MATMUL),
    (end, end, _GROUP),
    (exchange - 1, exchange, _DISPATCH.replace("{factor}", factor)),
    (last, last, handle),
    (first, first, _COMBINE),
  ]


def types(tree: ast.Module) -> list[tuple[int, int, str]]:
  """Returns the edits of configs/types.py; see `moe`."""
  ring, call = (
    "use_ring_of_experts: bool",
    "self.validate_ragged_buffer_factor(",
  )
  option = _only(_nodes(tree, ast.AnnAssign, ring), ring).end_lineno
  check = _only(_nodes(tree, ast.Expr, call), call).end_lineno
  # From 0.2.5 on, TransformerEngine may compute the layer.
  has_te = _nodes(tree, ast.AnnAssign, "te_moe_block: bool")
  refusal = _REFUSAL.replace(
    "{or_te}", " or self.te_moe_block" if has_te else ""
  )
  return [(option, option, _OPTION), (check, check, refusal)]


def diff(checkout: pathlib.Path) -> str:
  """Returns the unified diff for a checkout of MaxText."""
  diffs = []
  for name, edits in (("layers/moe.py", moe), ("configs/types.py", types)):
    path = f"src/maxtext/{name}"
    source = (checkout / path).read_text()
    old = source.splitlines(keepends=True)
    new = list(old)
    for first, last, text in sorted(edits(ast.parse(source)), reverse=True):
      new[first:last] = text.splitlines(keepends=True)
    diffs += difflib.unified_diff(old, new, f"a/{path}", f"b/{path}", n=1)
  return "".join(diffs)


if __name__ == "__main__":
  print(diff(pathlib.Path(sys.argv[1])), end="")
