# SPDX-License-Identifier: Apache-2.0
"""Each workaround names the reason for which it can go.

The comment of a workaround begins with one of these:

    Workaround (jax #40830, until jax 0.12): a bug, and the version without it
    Workaround (openxla/xla#39604):          a bug that is open
    Workaround (seen in jax 0.12.0):         a fault that has no number
"""

import pathlib
import re

import pytest

import ep
from ep import _public as public

_COMMENT = re.compile(r"Workaround \((.*?)\)")
_BUG = r"[\w/]+ ?#\d+"
_REASON = re.compile(
  rf"(?:{_BUG}, )?until jax (?P<until>[\d.]+)|{_BUG}|seen in jax (?P<seen>.+)"
)


def workarounds():
  """Returns the file and the reason of each workaround in the package."""
  folder = pathlib.Path(ep.__file__).parent
  for path in sorted(folder.rglob("*.py")):
    text = re.sub(r"\n *#? *", " ", path.read_text())  # joins a comment's lines
    for reason in _COMMENT.findall(text):
      yield str(path.relative_to(folder)), reason


def version(text):
  return tuple(map(int, text.split(".")))


def newest_jax():
  """Returns the newest version of JAX with which CI runs."""
  root = pathlib.Path(__file__).parents[2]
  lock = (root / "third_party/py/requirements_lock.txt").read_text()
  return max(map(version, re.findall(r"^jax==([\d.]+)", lock, re.M)))


@pytest.mark.parametrize("file, reason", [*workarounds()])
def test_a_workaround_is_needed(file, reason):
  match = _REASON.fullmatch(reason)
  assert match, f"{file}: a workaround needs a bug or a version, not {reason}"
  if until := match["until"]:
    oldest = version(public._FLOOR)
    assert oldest < version(until), f"{file}: remove what {reason} explains"
  if seen := match["seen"]:
    newest = newest_jax()[: len(version(seen))]
    assert newest <= version(seen), f"{file}: look at {newest}: {reason}"


def test_the_core_has_workarounds():
  assert len([*workarounds()]) > 5
