"""The table of supported models, from the reports of the sweep."""

from __future__ import annotations

from collections import Counter
from typing import Any

ATTENTION = ("right", "refused", "wrong", "missed", "not judged")

_MEANINGS = {
    "right": "every attention layer that ran is found, and each head's weights are those that attention used",
    "refused": "at least one attention layer is left out, with a warning that says why; the others are right",
    "wrong": "what is claimed of a layer is not what its attention does",
    "missed": "attention ran in a module that was neither found nor refused",
    "not judged": "attention ran, and could not be compared with the claim",
    "does not run": "layers are found, but no inputs could be made up that they run on",
    "not attention": "no multi-head attention ran, and none was found",
    "one head": "attention with a single head: there is nothing to compare",
    "does not build": "no small model could be built, or a library is not installed",
    "part": "a configuration of a part, which is examined in the models that contain it",
    "sweep failed": "examining it ended in an error or took too long",
}

_HEAD = """\
# Supported models

Which attention layers are read, and whether what is read of them is true. Every architecture below was built from a
configuration that is small and has random weights, and run once. The keys, queries, values and head outputs were taken
where attention is computed, and compared, head by head, with what the weights that `find_attention` gives make of
the layer's real input: what attention received for a head must be determined by the weights of that head, and of no
other. Counts of heads and widths are those of the tensors. Names and tables play no part in this comparison.

Where a query is learned, handed in or pooled from several tokens, no query weight is claimed, and that is compared as
well; where a filter or a matrix over tokens follows a projection, the rows of a head are compared at all tokens in it.
A layer of which a part is not read counts as right where all that is claimed of it is: "read without" names the part,
as the warning of `find_attention` does.

Some models are run as their documentation calls them (`tests/attention/sweep/documented/`), the others with inputs that
are made up from what their forward takes. Where a layer is refused without a forward, the model is examined once more
with `forward=`; that result counts unless more is refused with it. What could not be examined because of time or memory
(`sweep failed`) is listed and not counted.

A layer whose heads cannot be established is refused with a warning and left out; `register_layout` describes it.

{summary}

Written by `make zoo` with {versions}.

| verdict | architectures | meaning |
|---|---|---|
{meanings}
"""


def verdict_of(report: dict[str, Any]) -> str:
    """The verdict that the table counts."""
    return "part" if report["verdict"] == "no model" else report["verdict"]


def summary(reports: list[dict[str, Any]]) -> str:
    """Say how many of the architectures that have multi-head attention and run are right, refused and wrong."""
    counts = Counter(verdict_of(report) for report in reports)
    total = sum(counts[verdict] for verdict in ATTENTION)
    share = f"{100 * counts['right'] / total:.1f} %" if total else "none"
    reported = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ATTENTION)
    with_forward = sum(report["verdict"] == "right" and report.get("forward", False) for report in reports)
    if with_forward:
        reported = reported.replace(" right", f" right ({with_forward} of them read with `forward=`)", 1)
    return f"Of {total} architectures that have multi-head attention and run, {share} are right: {reported}."


def table(reports: list[dict[str, Any]], versions: str) -> str:
    """Write the page."""
    counts = Counter(verdict_of(report) for report in reports)
    meanings = "\n".join(f"| {v} | {counts[v]} | {_MEANINGS.get(v, '')} |" for v in _MEANINGS if counts[v])
    lines = [_HEAD.format(summary=summary(reports), versions=versions, meanings=meanings)]
    if len({report["key"] for report in reports}) > 1:
        lines.append("These results were gathered over several states of the package; `make zoo` renews them.\n")
    for library in sorted({report["library"] for report in reports}, reverse=True):
        own = [report for report in reports if report["library"] == library]
        with_attention = [report for report in own if verdict_of(report) in ATTENTION]
        lines += [f"## {library}\n", "| architecture | layout | heads | verdict | reason |", "|---|---|---|---|---|"]
        for report in sorted(with_attention, key=lambda report: report["name"]):
            cells = (report["name"], _kinds(report), _heads(report), verdict_of(report), _reason(report))
            lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
        lines.append("")
        for verdict in ("one head", "not attention", "part"):
            names = [report["name"] for report in own if verdict_of(report) == verdict]
            if names:
                lines += [f"**{verdict.capitalize()}** ({len(names)}): {', '.join(names)}.\n"]
        rest = [report for report in own if verdict_of(report) in ("does not run", "does not build", "sweep failed")]
        if rest:
            lines += ["| not examined | verdict | reason |", "|---|---|---|"]
            lines += [
                "| " + " | ".join(_cell(cell) for cell in (r["name"], verdict_of(r), r["reason"][:200])) + " |"
                for r in sorted(rest, key=lambda report: report["name"])
            ]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _kinds(report: dict[str, Any]) -> str:
    return ", ".join(sorted({facts["kind"] for facts in report.get("layers", {}).values()})) or "-"


def _heads(report: dict[str, Any]) -> str:
    """Heads, key heads and widths as the tensors have them."""
    shapes = {tuple(facts["heads"]) for facts in report.get("layers", {}).values() if facts["right"]}
    return ", ".join(
        f"{H} x {width}" if G == H else f"{H} on {G} x {width}" for H, G, width, _ in sorted(shapes, key=str)
    )


def _reason(report: dict[str, Any]) -> str:
    if report["verdict"] != "right":
        return report["reason"]
    remarks = {"read with `forward=`"} if report.get("forward") else set()
    remarks |= {remark for facts in report["layers"].values() for remark in facts["remarks"]}
    remarks |= {f"left out, without an attention that was seen: {one}" for one in _left_out(report)}
    return "; ".join(sorted(remarks))


def _left_out(report: dict[str, Any]) -> list[str]:
    """Name each kind of module that ran, is refused, and was not seen to attend to tokens, with the reason."""
    reasons = dict(sorted(report.get("said", {}).values()))
    return [f"{kind} ({reasons[kind]})" if kind in reasons else kind for kind in report.get("no_attention", ())]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
