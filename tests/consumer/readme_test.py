# SPDX-License-Identifier: Apache-2.0
"""Checks that a consumer's files contain the code blocks of the documentation.

    readme_test.py PAGE FILE [PAGE FILE...]

For a FILE named MODULE.bazel, each block of PAGE that begins with the line
"# MODULE.bazel" is in FILE, statement by statement. A .bazelrc is compared line
by line.
"""

import ast
import pathlib
import re
import sys


def blocks(page: str, name: str) -> list[str]:
  """Returns the code blocks that begin with the comment `# name`."""
  texts = re.findall(r"^```\w+\n(.*?)^```", page, re.M | re.S)
  return [text for text in texts if text.startswith(f"# {name}\n")]


def parts(text: str, name: str) -> list[str]:
  """Returns the statements of a Starlark file, or the lines of a .bazelrc."""
  if name == ".bazelrc":
    return [line for line in text.split("\n") if line and line[0] != "#"]
  # These Starlark statements are also valid Python.
  return [ast.unparse(statement) for statement in ast.parse(text).body]


def module_override(text: str) -> str:
  """Replaces a git_override with the consumer's local override."""
  local = 'local_path_override(module_name = "jax_ep", path = "../../..")'
  return re.sub(r"^git_override\(.*?^\)$", local, text, flags=re.M | re.S)


def missing(page: pathlib.Path, file: pathlib.Path) -> list[str]:
  """Returns the page's statements that the file lacks."""
  documented = blocks(page.read_text(), file.name)
  if not documented:
    return [f"any block that begins with # {file.name}"]
  present = parts(file.read_text(), file.name)
  return [
    part
    for block in documented
    for part in parts(module_override(block), file.name)
    if part not in present
  ]


def main() -> int:
  names = [pathlib.Path(name) for name in sys.argv[1:]]
  lines = [
    f"Not in both {page} and {file}: {part}"
    for page, file in zip(names[::2], names[1::2], strict=True)
    for part in missing(page, file)
  ]
  print("\n".join(lines))
  return int(bool(lines))


if __name__ == "__main__":
  sys.exit(main())
