"""How the documentation is built: `make docs`. Nothing is downloaded, neither now nor when a page is opened."""

from __future__ import annotations

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

from hdi_callback import __version__
from hdi_callback.monitoring.metrics import METRICS

project = "hdi_callback"
author = "The hdi_callback authors"
copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build", "benchmarks"]  # the benchmarks' reports are included by cost.md

html_theme = "furo"
html_title = "hdi_callback"
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["code.css"]

myst_enable_extensions = ["dollarmath", "substitution"]
myst_heading_anchors = 3
myst_substitutions = {
    "all_metrics": "\n".join(
        ["| name | read from | meaning | over layers |", "|---|---|---|---|"]
        + [
            f"| `{metric.name}` | {metric.source} | {metric.summary} | "
            f"{'' if metric.worst is None else f'`/{metric.worst}`'} |"
            for metric in METRICS.values()
        ]
    )
}

# --- The reference, from docstrings

default_role = "py:obj"  # single backticks in docstrings: a link where there is a target, else code
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 88

nitpick_ignore_regex = [
    # Types of arguments that are no part of the public door.
    (
        r"py:class",
        r"hdi_callback\.(monitoring\.(history\.(writer\.History|run_history\.RunHistory)|warn_once\.WarnOnce"
        r"|readings\.Measurement|ranks\.(ranks\.Ranks|rendezvous\.Rendezvous)|session\.schedule\.Schedule)|core\.products\.HeadProducts"
        r"|audits\.(audit\.LayerAudit|comparison\.LayerComparison)|integrations\.loop_host\.Loop(Settings|Host))",
    ),
    # The inventories of other projects would have to be downloaded.
    (
        r"py:.*",
        r"(torch|lightning|pl|ignite|pandas|pd|matplotlib|nn|types|os|pathlib|collections|typing_extensions)\..*",
    ),
    (r"py:.*", r"(Tensor|Module|Figure|Path|Self|Method|Role|Any|Callable|Iterable|Sequence|Mapping|TracebackType)"),
]


def without_factories(app, what, name, obj, options, signature, returns):
    """Write defaults that are made anew for each dataclass in a way that can be parsed."""
    return signature and signature.replace("<factory>", "..."), returns


def without_a_type(app, what, name, obj, options, lines) -> None:
    """Keep napoleon from reading "The heads: all of them" as a type and a description; types are in the signature."""
    if what in ("property", "attribute") and lines:
        lines[0] = f": {lines[0]}"
    for number, line in enumerate(lines[:-1]):
        if line.strip() in ("Returns:", "Yields:"):
            content = lines[number + 1]
            indent = len(content) - len(content.lstrip())
            lines[number + 1] = f"{content[:indent]}: {content[indent:]}"


def link_or_code(app, env, node, contnode):
    """Find what docstrings name by its last part alone (`head_diversity`); leave arguments and values as code."""
    if node["refdomain"] != "py":
        return None
    domain = env.domains["py"]
    name = node["reftarget"].removesuffix("()")
    found = {entry for entry in domain.objects if entry == name or entry.endswith(f".{name}")}
    found = {entry for entry in found if not domain.objects[entry].aliased}
    if len(found) == 1:
        node["reftarget"], node["refspecific"] = found.pop(), False
        return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", node["reftarget"], node, contnode)
    return contnode if node["reftype"] == "obj" else None


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
    app.connect("autodoc-process-signature", without_factories)
    app.connect("autodoc-process-docstring", without_a_type, priority=100)  # before napoleon
    app.connect("missing-reference", link_or_code)
