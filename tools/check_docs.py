# SPDX-License-Identifier: Apache-2.0
"""Checks that whatever the Markdown pages link to and quote is in the tree.

Usage: check_docs.py PAGE...

A page is at fault in each of these cases:

* A link leads to no file of the repository, or its #anchor to no heading.
* A Bazel label in code names no target and no file of its package.
* A flag in code (`--flag`) is one that no file uses or defines, or the value of
  `--config` has no line in .bazelrc.
* A path in code is not the end of the path of any tracked file or folder.
* A name in a code span (`a`, `a.b` or `A::b`) is not in the tree: no tracked
  file, pages left out, has all parts of the name among its words.

Code is a code span or a code block. Names in blocks are not checked, because
the examples there define names of their own. Names of one or two letters are
not checked, because they are those of formulas, and neither is anything that
is attached to a placeholder such as `<name>`. `_FOREIGN` lists the names and
files that are not ours.
"""

from collections.abc import Iterator, Mapping
import pathlib
import posixpath
import re
import subprocess
import sys

_FOREIGN = frozenset(
  """
  bazel-bin train.py max

  INTERNAL dispatching computation INVALID_ARGUMENT FAILED_PRECONDITION
  RESOURCE_EXHAUSTED DEADLINE_EXCEEDED UNAVAILABLE checkify
  jax_cpu_collectives_implementation cluster_detection_method
  xla_gpu_ragged_all_to_all_mode
  xla_gpu_unsupported_enable_ragged_all_to_all_decomposer

  MAX_SUPPORTED_TOKENS_PER_RANK NCCL_NVLS_ENABLE NCCL_SOCKET_IFNAME

  MeshResource dp_resource ep_resource fsdp_resource
  RouteOutput get_all_to_all_params ragged_buffer_factor selected_experts
  transform_bias use_ring_of_experts
  MoeDispatchCounts moe_mlp receiver_dropped sender_dropped token_valid
  w_up_gate _sparse_moe_call select_hook MoELayer act_btd
  apply_topk_weights_early aux_loss_coeff expert_bias gate_kernel group_topk
  scaling_factor total_recv_tokens use_pre_softmax wi_0 wi_0_bias wi_1 _MoEBlock
  fused_a2a fused_combine fused_dispatch hybrid_ep_combine hybrid_ep_dispatch
  num_permuted_tokens pad_multiple tokens_per_expert

  perf ep_dispatch_moe_3_

  OMPI_MCA_orte_hnp_uri KUBERNETES_SERVICE_HOST kubernetes DeprecationWarning
  py-spy plugins trace.json.gz major.minor.patch

  --nodes --ntasks-per-node --gpus-per-node --map-by --pid --local_test_jobs
  --noenable_workspace
  """.split()
)

_FENCED = re.compile(r"^```.*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^ {4}.*\n|^\n(?=    ))+", re.MULTILINE)
_SPAN = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
_PLACEHOLDER = re.compile(r"\S*<[^<>]*>\S*")
_LABEL = re.compile(r"(@\w+)?(?<!:)//(?=[\w:.])([\w/]*)(?::([\w.]+)|(\.\.\.))?")
_PATH = re.compile(
  r"(?<![\w/.$@-])[\w.-]+/(?:[\w.-]+/?)*"
  r"|(?<![\w/.$@-])\w+\.(?:bzl|cc|cu|h|lds|md|py|sh)\b"
)
_FLAG = re.compile(r"(?<![\w-])--([A-Za-z][\w-]*)(?:=([\w.]+))?")
_DEFINED = re.compile(r'DEFINE_\w+\(\s*"(\w+)"')
_NAME = re.compile(r"[A-Za-z_]\w*(?:(?:\.|::)[A-Za-z_]\w*)*", re.ASCII)
# ep_test appends this to the name that stands in a BUILD file.
_VARIANT = re.compile(r"_\d+x\d+_(?:cpu|gpu|xla)$")


def find_code(page: str) -> tuple[list[str], list[str]]:
  """Returns the code blocks and the code spans of a page."""
  prose = _FENCED.sub("", page)
  blocks = _FENCED.findall(page) + _INDENTED.findall(prose)
  return blocks, _SPAN.findall(_INDENTED.sub("", prose))


def anchors(page: str) -> set[str]:
  """Returns the anchors that GitHub gives to the headings of a page."""
  titles = _HEADING.findall(_FENCED.sub("", page))
  return {
    re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-")
    for title in titles
  }


class Tree:
  """The tracked files: their texts by path."""

  def __init__(self, texts: Mapping[str, str]):
    self._texts = texts
    self._ends = set()
    for path in texts:
      while path:
        parts = path.split("/")
        self._ends |= {"/".join(parts[i:]) for i in range(len(parts))}
        path = posixpath.dirname(path)
    own = "\n".join(
      text for path, text in texts.items() if not path.endswith((".md", ".txt"))
    )
    self._flags = {name for name, _ in _FLAG.findall(own)}
    self._flags |= set(_DEFINED.findall(own))
    self._words = [
      frozenset(re.findall(r"\w+", text) + re.split(r"\W", path))
      for path, text in texts.items()
      if not path.endswith((".md", ".txt"))  # pages and locks
    ]

  def faults(self, page: str) -> Iterator[str]:
    """Yields what is wrong with a page, a sentence for each fault."""
    text = self._texts[page]
    for link in _LINK.findall(_FENCED.sub("", text)):
      if not re.match(r"\w+:", link) and not self._has_link(page, link):
        yield f"the link {link} leads nowhere"
    blocks, spans = find_code(text)
    for block in blocks:
      yield from self._faults_of_code(block, with_names=False)
    for span in spans:
      yield from self._faults_of_code(span, with_names=True)

  def _faults_of_code(self, code: str, with_names: bool) -> Iterator[str]:
    code = _PLACEHOLDER.sub(" ", code)
    for label in _LABEL.finditer(code):
      if not self._has_target(*label.groups()):
        yield f"there is no target {label[0]}"
    code = _LABEL.sub(" ", code)
    for flag, value in _FLAG.findall(code):
      if not self._has_flag(flag, value):
        yield f"no file has the flag --{flag}{value and '=' + value}"
    for path in _PATH.findall(code):
      if not self._has_path(path):
        yield f"there is no file {path}"
    if with_names:
      for name in _NAME.findall(_PATH.sub(" ", code)):
        if not self._has_name(name):
          yield f"no file has the name {name}"

  def _has_path(self, path: str) -> bool:
    path = path.removeprefix("./").rstrip("/")
    return path in self._ends or path.split("/")[0] in _FOREIGN

  def _has_flag(self, flag: str, value: str) -> bool:
    if flag == "config" and value:
      return f":{value} " in self._texts.get(".bazelrc", "")
    return (
      flag in self._flags
      or f"--{flag}" in _FOREIGN
      # These are flags of Megatron-LM, XLA and Bazel.
      or flag.startswith(("moe-", "xla_", "incompatible_"))
    )

  def _has_name(self, name: str) -> bool:
    parts = {part for part in re.split(r"\W+", name) if len(part) > 2}
    return any(parts - _FOREIGN <= words for words in self._words)

  def _has_link(self, page: str, link: str) -> bool:
    target, _, anchor = link.partition("#")
    path = page
    if target:
      path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    if anchor:
      return anchor in anchors(self._texts.get(path, ""))
    return path in self._ends

  def _has_target(
    self, repository: str, package: str, name: str, recursive: str
  ) -> bool:
    if repository not in (None, "@jax_ep"):
      return True
    if recursive:
      return not package or package.rstrip("/") in self._ends
    build = self._texts.get(posixpath.join(package, "BUILD"), "")
    name = name or posixpath.basename(package)
    return posixpath.join(package, name) in self._texts or any(
      f'"{each}"' in build for each in (name, _VARIANT.sub("", name))
    )


def main(pages: list[str]) -> int:
  listing = subprocess.run(
    ["git", "ls-files", "-z"], check=True, capture_output=True, text=True
  )
  texts = {}
  for name in filter(None, listing.stdout.split("\0")):
    path = pathlib.Path(name)
    if path.is_file():
      texts[name] = path.read_text(errors="replace")
  tree = Tree(texts)
  faults = [f"{page}: {f}" for page in pages for f in tree.faults(page)]
  print("".join(f"{fault}\n" for fault in dict.fromkeys(faults)), end="")
  return int(bool(faults))


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
