# SPDX-License-Identifier: Apache-2.0
"""Sphinx's configuration; build.py runs it."""

import re

project = "ep"
html_title = "ep: expert parallelism for JAX"
html_theme = "furo"
html_copy_source = False
html_css_files = ["site.css"]
html_static_path = ["static"]
html_show_copyright = False
html_show_sphinx = False
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

myst_heading_anchors = 4  # as on a code host
pygments_style = "friendly"
pygments_dark_style = "monokai"

autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
maximum_signature_line_length = 72
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

# Code, and characters that reStructuredText would read as markup.
_MARKUP = re.compile(
  r"(?<!`)`([^`]+)`(?!`)|(\S\*|\*(?=\S)|\||_\b(?!\w)|\b[A-Z]\.)"
)


def setup(app):
  # Napoleon, with the default priority of 500, runs after this.
  app.connect("autodoc-process-docstring", _to_rest, priority=400)
  app.connect("autodoc-process-signature", _signature)


def _signature(app, what, name, obj, options, signature, returns):
  """Removes the signature of a class that users do not construct."""
  if what == "class" and "Args:" not in (obj.__doc__ or ""):
    return "", returns
  return None


def _to_rest(app, what, name, obj, options, lines):
  """Rewrites a docstring, which is Markdown, as reStructuredText."""
  if what == "data":  # its docstring is its type's
    lines.clear()
  written, prose = [], []
  margin, code = 0, None  # indentation of the prose, and of a block of code

  def end_of_prose():
    text = _MARKUP.sub(_escape, "\n".join(prose))
    written.extend(text.split("\n") if prose else [])
    prose.clear()

  for line, before in zip(lines, ["", *lines], strict=False):
    indent = len(line) - len(line.lstrip())
    if line and code is not None and indent < code:
      code = None
    if line and code is None and prose and not before and indent > margin:
      code = indent
      end_of_prose()
      written += [" " * margin + "::", ""]
    if code is None:
      if line.lstrip().startswith("* ") and before and indent > margin:
        prose.append("")
      prose.append(line)
      margin = indent if line else margin
    else:
      written.append(line)
  end_of_prose()
  lines[:] = written


def _escape(match: re.Match) -> str:
  code, markup = match.groups()
  return f"``{code}``" if code else re.sub(r"([*|_.])", r"\\\1", markup)
