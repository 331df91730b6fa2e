"""Every name that a user sees, with its meaning: of rules, curves, pictures, metrics, interventions and audits."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from hdi_callback.arguments import shown
from hdi_callback.dashboards.tags import AUDITED, LAYER_CURVES, MODEL_CURVES, PICTURES
from hdi_callback.errors import MisconfigurationError
from hdi_callback.interventions import Call, Intervention, QKClip, ReviveHeads, SaveCheckpoint, StopTraining
from hdi_callback.monitor import contract
from hdi_callback.monitor.metrics import METRICS
from hdi_callback.rules import RULES

Kind = Literal["curve", "picture", "metric", "rule", "alert", "intervention", "finding of hdi audit"]
INTERVENTIONS: dict[str, type[Intervention]] = {
    kind.__name__: kind for kind in (Call, QKClip, ReviveHeads, SaveCheckpoint, StopTraining)
}


@dataclass(frozen=True)
class Name:
    """A name that a user sees."""

    text: str
    kind: Kind
    meaning: str  # a sentence or two
    metric: str = ""  # of a curve of each layer


def _all_names() -> dict[str, Name]:
    names = [Name(rule.name, "rule", f"Raised when {rule.condition}. {rule.meaning}") for rule in RULES]
    names += [Name(contract.NAME, "alert", contract.MEANING)]
    for tag, curve in MODEL_CURVES.items():
        meaning = f"{curve.meaning[0].upper()}{curve.meaning[1:]}; {curve.range}. To expect: {curve.expect}."
        names.append(Name(tag, "curve", meaning))
    names += [Name(tag, "picture", meaning) for tag, meaning in PICTURES.items()]
    names += [Name(metric.name, "metric", metric.summary) for metric in METRICS.values()]
    names += [Name(name, "intervention", (kind.__doc__ or "").split("\n")[0]) for name, kind in INTERVENTIONS.items()]
    names += [Name(name, "finding of hdi audit", meaning) for name, meaning in AUDITED.items()]
    return {name.text: name for name in names}


NAMES = _all_names()
"""Text -> name."""


def describe_tag(tag: str) -> Name | None:
    """Return the name behind a tag on a dashboard, whatever its layer; `None` if it is not one of ours."""
    _, _, of_layer = tag.partition("hdi/per_layer/")
    if of_layer:
        short, _, layer = of_layer.partition("/")
        metric = METRICS.get(next((name for name, drawn in LAYER_CURVES.items() if drawn == short), short))
        return None if metric is None else Name(tag, "curve", f"{metric.summary} Of {layer or 'a layer'}.", metric.name)
    return next(
        (name for text, name in NAMES.items() if "/" in text and (tag == text or tag.startswith(f"{text}/"))), None
    )


def look_up(word: str) -> Name:
    """Return the name that a user has written: a tag, a metric, a rule or one of its limits, an intervention."""
    names = {_letters(limit): NAMES[rule.name] for rule in RULES for limit in rule.limits}
    names |= {_letters(text): name for text, name in NAMES.items()}
    names |= {_letters(text): NAMES[rule.name] for rule in RULES for text in (rule.__name__, rule.name)}
    entry = NAMES.get(word) or describe_tag(word) or names.get(_letters(word))
    if entry is None:
        close = difflib.get_close_matches(_letters(word), names, 1)
        hint = f" Did you mean {names[close[0]].text!r}?" if close else ""
        raise MisconfigurationError(f"Nothing has the name {shown(word)}; `hdi explain` lists every name.{hint}")
    return entry


def _letters(name: str) -> str:
    """The letters of a name; a slash stays, as `hdi/alignment` is a curve and `hdi_alignment` a metric."""
    return "".join(letter for letter in name.lower() if letter.isalnum() or letter == "/")
