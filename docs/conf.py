"""How the documentation is built: `make docs`. Nothing is downloaded, neither now nor when a page is opened."""

from __future__ import annotations

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

from hdi_callback import __version__

project = "hdi_callback"
author = "The hdi_callback authors"
copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "hdi_callback"
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["code.css"]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_numpy_docstring = False
napoleon_use_ivar = True


# --- Formulas: MathML, which browsers draw themselves, instead of a script from elsewhere


def to_mathml(formula: str, *, block: bool) -> str:
    # docutils takes \textstyle at the start of a group only; MathML's own rules give nearly the same.
    return tex2mathml(formula.replace(r"\textstyle", ""), as_block=block)


def visit_inline(self, node: nodes.math) -> None:
    self.body.append(to_mathml(node.astext(), block=False))
    raise nodes.SkipNode


def visit_block(self, node: nodes.math_block) -> None:
    self.body.append(f'<div class="math">{to_mathml(" ".join(node.astext().split()), block=True)}</div>\n')
    raise nodes.SkipNode


def setup(app) -> None:
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    app.config.html_math_renderer = "mathml"
