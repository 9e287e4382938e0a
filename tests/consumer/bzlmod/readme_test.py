# SPDX-License-Identifier: Apache-2.0
"""A consumer's files contain the blocks that a page tells readers to write.

    readme_test.py PAGE FILE [PAGE FILE...]

For a FILE named MODULE.bazel, each block of PAGE that begins with the line
"# MODULE.bazel" is in FILE, statement by statement. A .bazelrc is compared line
by line.
"""

import ast
import pathlib
import re
import sys
import textwrap


def blocks(page: str, name: str) -> list[str]:
  """Returns the code blocks that begin with the comment `# name`."""
  fenced = re.findall(r"^```\w+\n(.*?)^```", page, re.M | re.S)
  indented = re.findall(r"(?:^    .*\n|^\n(?=    ))+", page, re.M)
  texts = map(textwrap.dedent, fenced + indented)
  return [t for t in texts if t.strip().startswith(f"# {name}\n")]


def parts(text: str, name: str) -> list[str]:
  """Returns the statements of a Starlark file, or the lines of a .bazelrc."""
  if name == ".bazelrc":
    return [line for line in text.split("\n") if line and line[0] != "#"]
  # Both Starlark and Python parse these statements.
  return [ast.unparse(statement) for statement in ast.parse(text).body]


def module_override(text: str) -> str:
  """Replaces the page's git_override by the consumer's local override."""
  local = 'local_path_override(module_name = "jax_ep", path = "../../..")'
  return re.sub(r"^git_override\(.*?^\)$", local, text, flags=re.M | re.S)


def missing(page: pathlib.Path, file: pathlib.Path) -> list[str]:
  """Returns the statements that the page has and the file lacks."""
  told = blocks(page.read_text(), file.name)
  if not told:
    return [f"any block that begins with # {file.name}"]
  own = parts(file.read_text(), file.name)
  return [
    part
    for block in told
    for part in parts(module_override(block), file.name)
    if part not in own
  ]


def main() -> int:
  names = [pathlib.Path(name) for name in sys.argv[1:]]
  differs = False
  for page, file in zip(names[::2], names[1::2], strict=True):
    for part in missing(page, file):
      print(f"Not in both {page} and {file}: {part}")
      differs = True
  return int(differs)


if __name__ == "__main__":
  sys.exit(main())
