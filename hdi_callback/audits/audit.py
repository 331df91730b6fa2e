"""`audit`: the heads of a model or a checkpoint, layer by layer, and a verdict."""

from __future__ import annotations

import math
import os
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.arguments import function
from hdi_callback.attention import AttentionLayer, Survey, survey
from hdi_callback.attention.extra_forward import nothing_remains
from hdi_callback.attention.registry import known_layers
from hdi_callback.audits.sources import NOT_STORED, Target, open_target
from hdi_callback.audits.weight_files import first_line
from hdi_callback.dashboards.layer_table import layers_text, name_heads
from hdi_callback.dashboards.report import in_notebook
from hdi_callback.dashboards.verdict import Verdict, verdict
from hdi_callback.errors import MisconfigurationError
from hdi_callback.history import RunHistory
from hdi_callback.monitor.metrics import FINITENESS, KEYS, OV, QK
from hdi_callback.monitor.reading import Absent, Reading
from hdi_callback.monitor.weight_source import WeightReader
from hdi_callback.record import LEVELS, Alert, LayerRecord, Record
from hdi_callback.rules import Alerts
from hdi_callback.rules.initialisation import untrained_layers
from hdi_callback.rules.words import listed

_REMEDY = "write module:function that gives a model and a batch, or set example_input_array"
_NAMED = re.compile(r"att(n|ention)", re.IGNORECASE)
_DEAD = 0.01  # norm of a dead head, as a share of the median of the others
_WITHOUT = {
    "query": "Without queries all tokens are attended to alike",
    "key": "Without keys all tokens score alike",
    "value": "Without values a head adds nothing",
    "output": "Without an output a head adds nothing",
}


@dataclass(frozen=True, repr=False)
class Audit:
    """The result of an audit.

    Attributes:
        name: the audited model or file.
        layers: the facts of the layers whose heads are known, in model order.
        record: all numbers and findings, as a reading: findings are its active alerts.
        refused: attention whose heads could not be established -> the reason.
    """

    name: str
    layers: tuple[dict[str, Any], ...]
    record: Record
    refused: Mapping[str, str]

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
            facts["name"]: reason
            for facts in self.layers
            if facts["name"] not in reported and (reason := _why_not(facts, self.record.layers[facts["name"]]))
        }
        return {**without, **self.refused}

    @property
    def verdict(self) -> Verdict:
        """The result in a sentence or two, and what to do."""
        return verdict([self.record], self.layers, is_audit=True)

    def as_run(self) -> RunHistory:
        """Return the audit as a run of one reading, for `write_report`."""
        return RunHistory(Path(self.name), self.layers, (self.record,), is_audit=True)

    def to_dict(self) -> dict[str, Any]:
        """Return the audit as plain data, without the matrices: what ``hdi audit --json`` prints."""
        return {
            "model": self.name,
            "verdict": self.verdict.text,
            "state": self.verdict.state,
            "findings": [finding.to_dict() for finding in self.findings],
            "layers": [
                {**facts, "values": numbers.values, "heads": numbers.heads}
                for facts, numbers in zip(self.layers, self.record.layers.values())
            ],
            "not_audited": self.not_audited,
        }

    def _repr_html_(self) -> str:
        """Return the report, for a notebook."""
        return in_notebook(self.as_run())

    def __repr__(self) -> str:
        """The table of layers, what was not audited, and the verdict."""
        table = layers_text(self.layers, self.not_audited, self.record, self.findings)
        return f"{table}\n\n{self.verdict}".strip()


def audit(
    target: nn.Module | str | os.PathLike[str],
    *,
    model: str | Callable[..., Any] | None = None,
    forward: Callable[[], Any] | None = None,
    thresholds: Mapping[str, Mapping[str, float | None]] | None = None,
) -> Audit:
    """Judge the heads of a model or a checkpoint.

    Weights in files are mapped, not loaded, and no code from a file is executed. Attention is found by a forward on a
    batch that the model provides itself, or that is made up for a model of transformers; without one, only torch's own
    attention and registered layouts are found.

    Args:
        target: a model; or a folder that transformers wrote, a ``.safetensors`` file with its ``config.json`` beside
            it, a checkpoint or a state dict together with `model`, or ``"module:function"`` that gives a model, or a
            model and a batch.
        model: the class or function that builds the model of a checkpoint, or its name (``"package.module:Class"``).
        forward: for a model: a function without arguments that runs it, such as ``lambda: model(batch)``.
        thresholds: limits of the default rules, as `HDICallback` takes them: pattern of layer names -> limits.

    Returns:
        Layers, findings and a verdict.

    Raises:
        MisconfigurationError: if there is no such model, or it cannot be opened; the message says what to write.

    Example:
        >>> import torch
        >>> encoder = torch.nn.TransformerEncoderLayer(d_model=32, nhead=4, batch_first=True)
        >>> found = audit(torch.nn.Sequential(encoder))
        >>> [(facts["name"], facts["num_heads"]) for facts in found.layers], found.verdict.state
        ([('0.self_attn', 4)], 'clear')
    """
    function("forward", forward, "lambda: model(batch)")
    Alerts("default", thresholds)  # checks the limits
    opened, layers, refused = open_layers(target, model=model, forward=forward)
    facts = tuple(layer.description() for layer in layers)
    check_patterns(thresholds or (), [layer.name for layer in layers])
    # Rules pass over what pretrained weights had from the start, and an audit asks about just that.
    alerts = Alerts("default", thresholds, facts, pretrained=False)
    # Of fresh weights at step 0 rules ask other questions.
    step = opened.step or 1
    record = measure_weights(opened, layers, step=step)
    findings = list(alerts.judge(record))
    for layer in layers:
        missing = missing_weights(opened, layer)
        if NOT_STORED in missing:
            findings.append(_missing_finding(layer.name, missing, step))
        elif not missing:
            findings += _dead_heads(layer, step)
    findings += _copied_layers([layer for layer in layers if not missing_weights(opened, layer)], step)
    findings += [_untrained_finding(name, step) for name in untrained_layers(record, facts)]
    findings.sort(key=lambda alert: (-LEVELS.index(alert.level), -(alert.value or 0)))
    return Audit(opened.name, facts, replace(record, alerts=tuple(findings), active=tuple(findings)), refused)


def open_layers(
    target: Any, *, model: Any = None, forward: Callable[[], Any] | None = None
) -> tuple[Target, list[AttentionLayer], dict[str, str]]:
    """Open a model as `audit` does; return it, its layers, and name -> reason of attention that is not read."""
    opened = open_target(target, model=model, device="meta")
    layers, refused = find_layers(opened, forward)
    if not layers and any(parameter.is_meta for parameter in opened.model.parameters()):
        # A forward that asks for values, as experts of a mixture may, has to be run in memory.
        opened = open_target(target, model=model).load()
        layers, refused = find_layers(opened)
    return opened.load(), layers, refused


def find_layers(
    target: Target, forward: Callable[[], Any] | None = None
) -> tuple[list[AttentionLayer], dict[str, str]]:
    """Return the layers that the first runnable forward shows, and name -> reason of attention that is not read."""
    model = type(target.model).__name__
    reason = ""
    forwards: Sequence[Callable[[], Any] | None] = target.forwards if forward is None else [forward]
    if not forwards and not known_layers(target.model):
        return [], {model: f"its attention is read from a forward, and no batch is known: {_REMEDY}"}
    for run in forwards or [None]:
        surveyed = _survey(target.model, run)
        if isinstance(surveyed, Survey):
            refused = {refusal.name or model: refusal.reason for refusal in surveyed.refused}
            read_names = [*refused, *(layer.name for layer in surveyed.layers)]
            return list(surveyed.layers), refused | _named_like_attention(target.model, read_names)
        reason = reason or surveyed
    return [], {model: reason}


def _survey(model: nn.Module, run: Callable[[], Any] | None) -> Survey | str:
    """Find the attention of a model by a forward of which nothing remains; the reason if the forward raises."""
    try:
        with nothing_remains(model):
            return survey(model, run)
    except MisconfigurationError:  # a registered layout that does not fit
        raise
    except Exception as error:
        return f"its forward raised {type(error).__name__} ({first_line(error)}): {_REMEDY}"


def _named_like_attention(model: nn.Module, read_names: list[str]) -> dict[str, str]:
    """Name modules that are called attention, and in which none was seen."""
    unread_modules: dict[str, str] = {}
    for name, module in model.named_modules():
        is_named = any(_NAMED.search(part) for part in (name.rpartition(".")[2], type(module).__name__))
        other_names = [other_name.partition("#")[0] for other_name in (*read_names, *unread_modules)]
        is_apart = not any(
            f"{other_name}.".startswith(f"{name}.") or f"{name}.".startswith(f"{other_name}.")
            for other_name in other_names
        )
        if name and is_named and is_apart and sum(part.dim() > 1 for part in module.parameters()) > 1:
            unread_modules[name] = (
                "no softmax attention was seen in it: it did not run, or its attention is of another kind"
            )
    return unread_modules


def measure_weights(target: Target, layers: Sequence[AttentionLayer], *, step: int) -> Record:
    """Measure what the weights of layers alone tell: key weights, circuits, and whether they are finite."""
    absent = Absent()
    readable = []
    for layer in layers:
        missing = missing_weights(target, layer)
        if missing:
            for source in (KEYS, QK, OV, FINITENESS):
                absent.note(layer.name, source, missing)
        else:
            readable.append(layer)
    results = WeightReader((KEYS, QK, OV, FINITENESS)).measure(step, readable, absent)
    return Reading(step, [layer.name for layer in layers], results, absent).record()


def missing_weights(target: Target, layer: AttentionLayer, roles: Sequence[str] | None = None) -> str:
    """Return why the weights of a layer, or those of some roles, have no numbers; empty if they have."""
    names = {id(parameter): name for name, parameter in target.model.named_parameters()}
    parameters = [weight for role in roles or layer.weights for weight in layer.weights[role].parameters()]
    on_meta = any(parameter.is_meta for parameter in parameters)
    parameter_names = dict.fromkeys(names.get(id(parameter), "") for parameter in parameters)
    reasons = [f"`{name}`: {target.missing[name]}" for name in parameter_names if name in target.missing]
    return "; ".join(reasons) or ("its weights are on the meta device, which holds no numbers" if on_meta else "")


def _why_not(facts: Mapping[str, Any], numbers: LayerRecord) -> str:
    if "hdi_worst_alignment" in numbers.values:
        return ""
    if facts["num_key_heads"] < 2:
        return "it has one key head, which there is nothing to compare with"
    return numbers.absent.get(KEYS) or numbers.absent.get("hdi_worst_alignment") or "its heads were not compared"


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
        message = (
            f"{name_heads(heads, len(norms), unit)} of {layer.name} {verb} dead: the {role} weights are all but zero"
        )
        action = f"{_WITHOUT[role]}: look for what emptied them (weight decay, a mask, a file without them), or prune."
        alert = Alert(step, "dead heads", "warning", {layer.name: heads}, message, action, value=float(len(heads)))
        alerts.append(replace(alert, metric="hdi_dead_heads" if role == "key" else None, unit=unit))
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
            other, same = before.setdefault(
                (role, hash((tensor.shape, float(tensor.sum(dtype=torch.float64))))), (layer, tensor)
            )
            shares = {*map(id, weight.parameters())} & {*map(id, other.weights[role].parameters())}
            if other is not layer and not shares and torch.equal(tensor, same):
                copied.setdefault(other.name, []).append(role)
        for name, roles in copied.items():
            message = f"the {listed(roles)} weights of {layer.name} are those of {name} to the bit"
            action = "Look at the loop that filled the layers, and at how the file was written."
            alerts.append(Alert(step, "copied layers", "warning", {layer.name: (), name: ()}, message, action))
    return alerts if 2 * len(alerts) < len(layers) else []  # torch's encoders begin with equal layers


def _untrained_finding(layer: str, step: int) -> Alert:
    message = f"{layer} looks untrained: its keys have the spectrum of an initialisation, and those of other layers not"
    action = "Look at whether the file holds its weights, and whether it was in the optimizer."
    return Alert(step, "untrained layer", "notice", {layer: ()}, message, action)


def _missing_finding(layer: str, missing: str, step: int) -> Alert:
    message = f"weights of {layer} are missing: {missing}"
    return Alert(
        step,
        "weights missing",
        "warning",
        {layer: ()},
        message,
        "Look at how the file was written, and by which names.",
    )


def judge_again(run: RunHistory, thresholds: Mapping[str, Mapping[str, float | None]]) -> RunHistory:
    """Judge the readings of a run by the default rules with other limits."""
    alerts = Alerts("default", thresholds, run.layers)
    check_patterns(thresholds, [facts["name"] for facts in run.layers])
    records = []
    for record in run.records:
        new_alerts = alerts.judge(replace(record, alerts=(), active=()))
        records.append(replace(record, alerts=new_alerts, active=alerts.active))
    return replace(run, records=tuple(records))


def check_patterns(patterns: Iterable[str], layers: Iterable[str]) -> None:
    """Raise an error if a pattern matches no layer."""
    names = list(layers)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise MisconfigurationError(
                f"No layer matches the pattern {pattern!r}: the layers are {', '.join(names) or 'none'}."
            )
