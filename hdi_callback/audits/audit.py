"""`audit`: the heads of a model or a checkpoint, layer by layer, and a verdict."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.arguments import listed
from hdi_callback.attention import AttentionLayer, Survey, survey
from hdi_callback.attention.discovery.own_inputs import forward_of_torchs_attention
from hdi_callback.audits.pairs import unmatched_weights
from hdi_callback.audits.sources import NOT_STORED, Target, open_target
from hdi_callback.dashboards.layer_table import layers_text
from hdi_callback.dashboards.verdict import Verdict, verdict
from hdi_callback.monitor.metrics import FINITENESS, KEYS, OV, QK
from hdi_callback.monitor.reading import Absent, Reading
from hdi_callback.monitor.weight_source import WeightReader
from hdi_callback.record import LEVELS, Alert, Record
from hdi_callback.rules import Alerts
from hdi_callback.rules.rule import heads_in_words

_SOURCES = (KEYS, QK, OV, FINITENESS)
_DEAD = 0.01  # norm of a dead head, as a share of the median of the others


@dataclass(frozen=True, repr=False)
class Audit:
    """The result of an audit."""

    name: str  #: the audited model or file
    layers: tuple[dict[str, Any], ...]  #: the facts of the layers whose heads are known, in model order
    record: Record  #: all numbers and findings, as a reading; findings are its active alerts
    refused: Mapping[str, str]  #: attention whose heads could not be established -> the reason

    @property
    def findings(self) -> tuple[Alert, ...]:
        """What was found, the most serious first."""
        return self.record.active

    @property
    def not_audited(self) -> dict[str, str]:
        """Layers whose heads were not compared, and attention that is not read -> the reason."""
        # NaN weights are a finding, and what is not in a file is one beside its reason.
        reported = {layer for finding in self.findings if finding.rule != "weights missing" for layer in finding.where}
        without = {
            name: numbers.absent.get(KEYS) or numbers.absent["hdi_worst_alignment"]
            for name, numbers in self.record.layers.items()
            if name not in reported and "hdi_worst_alignment" not in numbers.values
        }
        return {**without, **self.refused}

    @property
    def verdict(self) -> Verdict:
        """The result in a sentence or two, and what to do."""
        return verdict([self.record], self.layers, is_audit=True)

    def _repr_html_(self) -> str:
        return f'<pre style="white-space: pre-wrap">{escape(repr(self))}</pre>'

    def __repr__(self) -> str:
        """The table of layers, what was not audited, and the verdict."""
        table = layers_text(self.layers, self.not_audited, self.record, self.findings)
        notices = [f"Notice: {finding.message}." for finding in self.findings if finding.level == "notice"]
        return "\n\n".join(filter(None, [table, *notices, self.verdict.text]))


def audit(
    target: nn.Module | str | os.PathLike[str],
    *,
    model: str | Callable[..., Any] | None = None,
    forward: Callable[[], Any] | None = None,
) -> Audit:
    """Return the attention layers of a model or a checkpoint, what is unusual about their heads, and a verdict.

    No code from a file is executed. Attention is found by a forward on a batch that the model provides itself, or that
    is made up for a model of transformers; without one, only torch's own attention is found.

    Args:
        target: a model; or a folder that transformers wrote, a checkpoint or a state dict together with `model`, or
            ``"module:function"`` that gives a model, or a model and a batch.
        model: the class or function that builds the model of a checkpoint, or its name (``"package.module:Class"``).
        forward: for a model: a function without arguments that runs it, such as ``lambda: model(batch)``.

    Raises:
        MisconfigurationError: if there is no such model, it cannot be opened, or no forward of it runs; the message
            says what to write.

    Example:
        >>> import torch
        >>> encoder = torch.nn.TransformerEncoderLayer(d_model=32, nhead=4, batch_first=True)
        >>> found = audit(torch.nn.Sequential(encoder))
        >>> [(facts["name"], facts["num_heads"]) for facts in found.layers], found.verdict.state
        ([('0.self_attn', 4)], 'clear')
    """
    opened = open_target(target, model=model)
    own = forward_of_torchs_attention(opened.model)
    forwards = [forward] if forward is not None else opened.forwards or ([own] if own else [])
    surveyed: Survey = opened.first_result(partial(survey, opened.model), forwards)
    layers = surveyed.layers
    refused = {refusal.name: refusal.reason for refusal in surveyed.refused}
    facts = tuple(layer.description() for layer in layers)
    # Rules pass over what pretrained weights had from the start, and an audit asks about just that.
    alerts = Alerts("default", None, facts, pretrained=False)
    step = 1  # as rules ask other questions of fresh weights at step 0
    missing = {layer.name: reason for layer in layers if (reason := _missing_weights(opened, layer))}
    whole = [layer for layer in layers if layer.name not in missing]
    absent = Absent()
    for name, reason in missing.items():
        for source in _SOURCES:
            absent.note(name, source, reason)
    numbers, _ = WeightReader(_SOURCES).measure(step, whole, absent)  # what weights alone tell
    record = Reading(step, [layer.name for layer in layers], numbers, absent).record()
    findings = list(alerts.judge(record))
    for name, reason in missing.items():
        if NOT_STORED in reason:
            message, action = f"weights of {name} are missing: {reason}", "Look at how it was written"
            findings.append(Alert(step, "weights missing", "warning", {name: ()}, message, action))
    findings += [alert for layer in whole for alert in _dead_heads(layer, step)] + _copied_layers(whole, step)
    told = {name for finding in findings for name in finding.where}
    findings += unmatched_weights([layer for layer in whole if layer.name not in told], step)
    findings.sort(key=lambda alert: (-LEVELS.index(alert.level), -(alert.value or 0)))
    return Audit(opened.name, facts, replace(record, alerts=tuple(findings), active=tuple(findings)), refused)


def _missing_weights(target: Target, layer: AttentionLayer) -> str:
    """Return why weights of a layer have no numbers; empty if they have."""
    names = {id(parameter): name for name, parameter in target.model.named_parameters()}
    reasons: dict[str, str] = {}
    for parameter in (part for weight in layer.weights.values() for part in weight.parameters()):
        name = names.get(id(parameter), "")
        if name in target.missing:
            reasons[name] = target.missing[name]
        elif parameter.is_meta:
            reasons[name] = "it is on the meta device, which holds no numbers"
        elif not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
            reasons[name] = f"it is quantised ({str(parameter.dtype).removeprefix('torch.')})"
    return "; ".join(f"`{name}`: {reason}" for name, reason in reasons.items())


def _dead_heads(layer: AttentionLayer, step: int) -> list[Alert]:
    """Find heads whose weights of a role are all but zero; in a run they show as vanishing weights."""
    alerts = []
    for role, weight in layer.weights.items():
        norms = weight.tensor().detach().float().flatten(1).norm(dim=1).tolist()
        least = _DEAD * statistics.median(norms)
        heads = tuple(head for head, norm in enumerate(norms) if norm <= least)  # NaN is not
        if not heads or not all(map(math.isfinite, norms)):
            continue
        unit = "heads" if len(norms) == layer.num_heads else "key heads"
        verb = "is" if len(heads) == 1 else "are"
        names = heads_in_words([heads], layer.name, unit.removesuffix("s"), len(norms))
        message = f"{names} {verb} dead: the {role} weights are all but zero"
        action = "Look for what emptied them (weight decay, a mask, a file without them), or prune."
        value = float(len(heads))
        alerts.append(Alert(step, "dead heads", "warning", {layer.name: heads}, message, action, value, unit=unit))
    return alerts


def _copied_layers(layers: Sequence[AttentionLayer], step: int) -> list[Alert]:
    """Find layers of which a role has the weights of another layer to the bit, though it is another parameter."""
    alerts, before = [], dict[tuple[str, int], tuple[AttentionLayer, Tensor]]()
    for layer in layers:
        copied: dict[str, list[str]] = {}
        for role, weight in layer.weights.items():
            tensor = weight.tensor().detach()
            if not tensor.any():
                continue  # told as dead
            key = role, hash((tensor.shape, float(tensor.sum(dtype=torch.float64))))
            earlier, weights = before.setdefault(key, (layer, tensor))
            shared = {*map(id, weight.parameters())} & {*map(id, earlier.weights[role].parameters())}
            if earlier is not layer and not shared and torch.equal(tensor, weights):
                copied.setdefault(earlier.name, []).append(role)
        for name, roles in copied.items():
            message = f"the {listed(roles)} weights of {layer.name} are those of {name} to the bit"
            action = "Look at the loop that filled the layers, and at how the file was written."
            alerts.append(Alert(step, "copied layers", "warning", {layer.name: (), name: ()}, message, action))
    return alerts if 2 * len(alerts) < len(layers) else []  # torch's encoders begin with equal layers
