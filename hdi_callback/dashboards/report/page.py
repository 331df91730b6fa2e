"""The HTML of a report: text that can be read without a script, and the data that the script draws."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from importlib import resources
from typing import Any

from hdi_callback.dashboards.report.page_data import QUANTITIES, WORST
from hdi_callback.dashboards.report.runs import RunPage
from hdi_callback.monitoring.plain_table import decimal

_SIGNS = {"bad": "&#9888; UNUSUAL", "good": "&#10003; NOTHING UNUSUAL", "unknown": "NOTHING TO JUDGE"}
_MOST_ROWS = 12

_MEANINGS = (
    ("alignment of two heads", "Overlap of the subspaces of their key weights, against chance: 0 for independent "
     "random heads, 1 for identical ones. From 0.8 on a pair is reported."),
    ("mean alignment", "The mean over all pairs of heads of a layer. From 0.5 on it is reported; 0.9 is critical."),
    ("by energy", "The same with directions weighted by their strength. Healthy language models often come close to 1, "
     "as they first learn one direction for all heads: the curve says more than the number alone."),
    ("HDI, chance", "Head Diversity Index: 1 minus the mean overlap of all pairs. Chance is its value for random heads "
     "of the same sizes."),
    ("effective heads", "Number of mutually orthogonal heads that would be as diverse."),
    ("directions of a head", "Number of directions over which a head spreads its energy (participation ratio of its "
     "squared singular values). A head that falls to few directions loses rank."),
    ("dead head", "A head whose key weights are nearly zero."),
)  # fmt: skip


def page(title: str, runs: Sequence[RunPage], differences: Sequence[tuple[str, Sequence[str]]], script: str) -> str:
    """Write the page.

    Args:
        title: its title.
        runs: the runs.
        differences: for several runs: a label, and the value of each run.
        script: the source of plotly.js.

    Returns:
        A whole HTML document that loads nothing.
    """
    style, own = (resources.files(__package__).joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    data = json.dumps([run.data for run in runs], separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    sections = "\n".join(_section(place, run, len(runs) == 1) for place, run in enumerate(runs))
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><meta name="generator" content="hdi_callback">
<link rel="icon" href="data:,"><title>{_e(title)}</title><style>{style}</style></head>
<body><main><h1>{_e(title)}</h1>
{_differences(runs, differences)}
<div class="runs {"several" if len(runs) > 1 else "single"}">
{sections}
</div>
{_meanings()}
</main>
<noscript><p>The maps are drawn by a script, which is switched off; the tables hold the numbers.</p></noscript>
<script type="application/json" id="hdi-data">{data}</script>
<script>{script}</script>
<script>{own}</script>
</body></html>
"""


def _section(place: int, run: RunPage, is_alone: bool) -> str:
    is_audit = bool(run.data["isAudit"])
    facts = "".join(f"<tr><th scope='row'>{_e(label)}</th><td>{_e(value)}</td></tr>" for label, value in run.facts)
    maps = _maps(run.data) if run.layers and run.data["layers"] else "<p>There is no reading yet.</p>"
    happened = "" if is_audit or not run.data["layers"] else _timeline(run.data)
    return f"""<section class="run" id="run-{place}" data-verdict="{_e(run.verdict)}">
{"" if is_alone else f"<h2>{_e(run.name)}</h2>"}
<div class="verdict {run.state}" role="status"><span class="sign">{_SIGNS[run.state]}</span>{_e(run.verdict)}</div>
{maps}
{happened}
{_pairs(run)}
{_spectra() if run.data["layers"] else ""}
<h3>{"What was audited" if is_audit else "What was trained and watched"}</h3>
<table class="facts">{facts}</table>
{_events(run.data)}
</section>"""


def _maps(data: dict[str, Any]) -> str:
    together = math.ceil(len(data["readings"]) / max(1, len(data["steps"])))
    merged = f" A column is the highest of {together} readings, at the step of the last." if together > 1 else ""
    return f"""<div class="controls">
<label>Layer <select class="layer-choice" aria-label="Layer"></select></label>
<label>Colour <select class="quantity-choice" aria-label="What the colours show"></select></label>
<label class="wide-label"><span class="step-words"></span><input class="slider" type="range" min="0" step="1"
 aria-label="Step"></label>
</div>
{_scale()}
<div class="two">
<figure><h3>Layers</h3><div class="layers-map" role="img" aria-label="Map of layers by steps"></div>
<figcaption><span class="rows-note"></span> Red dots are alerts; choose a cell to see its heads.{merged}</figcaption>
</figure>
<figure><h3>Heads of the layer</h3><p class="pair"></p>
<div class="heads-map" role="img" aria-label="Map of heads by heads"></div></figure>
</div>"""


def _scale() -> str:
    boxes = (("#00224e", "0: as by chance"), ("#7c7b78", "0.5: limit of the mean"), ("#c8b866", "0.8: limit of a pair"),
             ("#fee838", "1: identical heads"), ("var(--grey)", "not measured"))  # fmt: skip
    parts = [f'<span><span class="box" style="background:{colour}"></span>{words}</span>' for colour, words in boxes]
    return f'<div class="scale">{"".join(parts)}<span><span class="box ring"></span>the pair that is named</span></div>'


def _timeline(data: dict[str, Any]) -> str:
    names = ", ".join(_e(curve["name"]) for curve in data["losses"])
    above = f"Above: {names}. Below: the " if names else "The "
    return f"""<h3>What happened when</h3>
<figure><div class="timeline" role="img" aria-label="What happened when"></div>
<figcaption>{above}alignment of the closest pair of all layers. &#9650; alert, &#9660; resolved, &#9670; intervention;
dashed: the limits 0.5 and 0.8.</figcaption></figure>"""


def _pairs(run: RunPage) -> str:
    alerted = run.data["alerted"]
    rows = sorted(run.data["table"], key=lambda row: (row["layer"] not in alerted, -_or_least(row["worst"])))
    if not rows:
        return ""
    cells = "".join(_pair_row(row, row["layer"] in alerted) for row in rows[:_MOST_ROWS])
    more = ""
    if len(rows) > _MOST_ROWS:
        rest = "".join(_pair_row(row, row["layer"] in alerted) for row in rows[_MOST_ROWS:])
        more = (
            f"<details><summary>{len(rows) - _MOST_ROWS} more layers</summary><table>{_HEADING}{rest}</table></details>"
        )
    when = "" if run.data["isAudit"] else ", at the end"
    return f"<h3>The closest heads of each layer{when}</h3><table>{_HEADING}{cells}</table>{more}"


def _or_least(value: float | None) -> float:
    return -math.inf if value is None else value


_HEADING = (
    '<tr><th scope="col">layer</th><th scope="col">heads</th><th scope="col" class="number">aligned</th>'
    '<th scope="col" class="number">mean</th><th scope="col" class="number minor">by energy</th>'
    '<th scope="col" class="number minor">HDI / chance</th><th scope="col" class="number minor">effective heads</th>'
    '<th scope="col" class="minor">dead heads</th></tr>'
)


def _pair_row(row: dict[str, Any], is_alerted: bool) -> str:
    effective = "-" if row["effective"] is None else f"{row['effective']:.1f}"
    dead = ", ".join(map(str, row["dead"])) or ("-" if row["effective"] is None else "none")
    return (
        f"<tr{' class=alerted' if is_alerted else ''}><td class='layer'>{_e(row['layer'])}</td>"
        f'<td class="heads">{" and ".join(map(str, row["pair"])) or "-"}</td>'
        f'<td class="number">{decimal(row["worst"])}</td><td class="number">{decimal(row["mean"])}</td>'
        f'<td class="number minor">{decimal(row["energy"])}</td>'
        f'<td class="number minor">{decimal(row["hdi"])} / {decimal(row["chance"])}</td>'
        f'<td class="number minor">{effective}</td>'
        f'<td class="minor">{dead}</td></tr>'
    )


def _spectra() -> str:
    return """<h3>Directions that each head of the layer uses</h3>
<figure><div class="spectra" role="img" aria-label="Directions over which each head spreads its energy"></div>
<figcaption class="spectra-note"></figcaption></figure>"""


def _events(data: dict[str, Any]) -> str:
    found = ""
    if data["alerts"] and data["isAudit"]:
        rows = "".join(
            f"<tr><td>{_e(alert['level'])}</td><td>{_e(alert['layer'])}: {_e(alert['what'])}{_remedy(alert)}</td></tr>"
            for alert in data["alerts"]
        )
        count = len(data["alerts"])
        found += f"<details><summary>Every finding ({count})</summary><table>{rows}</table></details>"
    elif data["alerts"]:
        shown = data["alerts"]
        rows = "".join(
            f"<tr><td class='number'>{alert['step']}</td>"
            f"<td>{_e(alert['status'])}</td><td>{_e(alert['message'])}</td></tr>"
            for alert in shown
        )
        some = f", the last {len(shown)} of {data['numAlerts']}" if data["numAlerts"] > len(shown) else ""
        heading = '<tr><th class="number">step</th><th>level</th><th>alert</th></tr>'
        found += f"<details><summary>Every alert ({len(shown)}{some})</summary><table>{heading}{rows}</table></details>"
    if data["actions"]:
        rows = "".join(
            f"<tr><td class='number'>{action['step']}</td><td>{_e(action['message'])}</td></tr>"
            for action in data["actions"]
        )
        heading = '<tr><th class="number">step</th><th>what was done</th></tr>'
        count = len(data["actions"])
        found += f"<details><summary>Every intervention ({count})</summary><table>{heading}{rows}</table></details>"
    return found


def _remedy(finding: dict[str, Any]) -> str:
    return f"; try {_e(finding['remedy'])}" if finding["remedy"] else ""


def _differences(runs: Sequence[RunPage], differences: Sequence[tuple[str, Sequence[str]]]) -> str:
    if len(runs) < 2:
        return ""
    heading = "".join(f"<th scope='col'>{_e(run.name)}</th>" for run in runs)
    rows = "".join(
        f"<tr><th scope='row'>{_e(label)}</th>{''.join(f'<td>{_e(value)}</td>' for value in values)}</tr>"
        for label, values in differences
    )
    return f"<h2>What differs</h2><table class='differences'><tr><th></th>{heading}</tr>{rows}</table>"


def _meanings() -> str:
    items = "".join(f"<dt>{_e(term)}</dt><dd>{_e(words)}</dd>" for term, words in _MEANINGS)
    return f"<h2>What each number means</h2><dl>{items}</dl>"


def differences_of(runs: Sequence[RunPage]) -> list[tuple[str, list[str]]]:
    """The differences of several runs, most important first.

    Args:
        runs: the runs.

    Returns:
        A label, and the value of each run.
    """
    found = [
        ("active alerts", [_standing(run) for run in runs]),
        ("closest pair at the end", [_closest(run) for run in runs]),
    ]
    labels = list(dict.fromkeys(label for run in runs for label, _ in run.facts))
    for label in labels:
        values = [dict(run.facts).get(label, "-") for run in runs]
        if len(set(values)) > 1 and label not in ("alerts", "history", "began"):
            found.append((label, values))
    last_layers = [run.last.layers if run.last is not None else {} for run in runs]
    shared = [name for name in last_layers[0] if all(name in last for last in last_layers)]
    for metric in (WORST, "hdi_alignment"):
        spread: dict[str, tuple[float, list[float]]] = {}
        for name in shared:
            known = [last[name].values[metric] for last in last_layers if metric in last[name].values]
            if len(known) == len(last_layers):
                spread[name] = (max(known) - min(known), known)
        top = sorted(spread, key=lambda name: -spread[name][0])[:3]
        words = QUANTITIES[metric].lower()
        found += [
            (f"{name}: {words}", [decimal(value) for value in spread[name][1]])
            for name in top
            if spread[name][0] > 0.005
        ]
    return found


def _standing(run: RunPage) -> str:
    layers = list(dict.fromkeys(alert.layer for alert in run.active))
    more = f" and {len(layers) - 2} more" if len(layers) > 2 else ""
    return f"{len(run.active)}: {', '.join(layers[:2])}{more}" if layers else "none"


def _closest(run: RunPage) -> str:
    rows = [row for row in run.data["table"] if row["worst"] is not None]
    if not rows:
        return "-"
    row = max(rows, key=lambda row: row["worst"])
    return f"heads {' and '.join(map(str, row['pair']))} of {row['layer']} ({decimal(row['worst'])})"


def _e(text: Any) -> str:
    return html.escape(str(text), quote=True)
