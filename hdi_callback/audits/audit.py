"""`audit`: the heads of a model or a checkpoint, layer by layer, and a verdict."""

from __future__ import annotations

import html
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from hdi_callback.attention import AttentionLayer, Role, survey
from hdi_callback.attention.autocast import without_autocast
from hdi_callback.attention.layer.sharding import Sharding
from hdi_callback.attention.names import printable
from hdi_callback.attention.wrappers import inner_model, users_name
from hdi_callback.audits.one_layer import with_weights
from hdi_callback.audits.sources import Source, open_source
from hdi_callback.audits.stored import first_line
from hdi_callback.errors import HDIError, MisconfigurationError
from hdi_callback.monitoring.alerts import LEVELS, Alert, Alerts, Finding
from hdi_callback.monitoring.metrics import FINITENESS
from hdi_callback.monitoring.monitor.movement import LastWeights
from hdi_callback.monitoring.monitor.sources import weight_sources
from hdi_callback.monitoring.monitor.weights import WeightSource
from hdi_callback.monitoring.plain_table import decimal, heads_in_words, plain_table
from hdi_callback.monitoring.readings import LayerRecord, Measurement, Reading, Record
from hdi_callback.monitoring.rules import DeadHeads, choose_rules
from hdi_callback.monitoring.rules.words import named_heads
from hdi_callback.monitoring.session.patterns import check_patterns

Progress = Callable[[int, int, str], None]
"""Called with the number of layers done, the number of all, and the name of the next one."""


@dataclass(frozen=True)
class LayerAudit:
    """The head diversity of one layer, from its key weights.

    Attributes:
        name: dotted path of the layer.
        num_heads: number of query heads.
        num_key_heads: number of key heads, which are compared.
        head_dim: width of a key head.
        hdi: Head Diversity Index; `None`, as every number here, if it could not be measured.
        chance: the index of independent random heads of these ranks.
        alignment: mean overlap against chance: 0 chance, 1 identical.
        energy_alignment: the same with directions weighed by their energy.
        worst_alignment: alignment of the closest pair.
        worst_pair: its two heads; empty if there is none.
        energy_worst_alignment: alignment of the pair that is closest when weighed by energy.
        energy_worst_pair: its two heads.
        effective_heads: how many orthogonal heads would be as diverse.
        dead_heads: heads whose key weights are nearly zero, relative to the others.
        absent: why there are no numbers; empty if there are.
    """

    name: str
    num_heads: int
    num_key_heads: int
    head_dim: int
    hdi: float | None = None
    chance: float | None = None
    alignment: float | None = None
    energy_alignment: float | None = None
    worst_alignment: float | None = None
    worst_pair: tuple[int, ...] = ()
    energy_worst_alignment: float | None = None
    energy_worst_pair: tuple[int, ...] = ()
    effective_heads: float | None = None
    dead_heads: tuple[int, ...] = ()
    absent: str = ""


@dataclass(frozen=True, repr=False)
class Audit:
    """The result of an audit: layers, findings and a verdict.

    Attributes:
        name: the audited model or file.
        layers: every layer whose heads are known, in model order.
        refused: attention whose heads could not be established -> the reason.
        findings: unusual findings, the most serious first.
        record: all numbers and matrices, as a reading.
        facts: facts about each layer, as plain data.
    """

    name: str
    layers: tuple[LayerAudit, ...]
    refused: Mapping[str, str]
    findings: tuple[Alert, ...]
    record: Record
    facts: tuple[dict[str, Any], ...]

    @property
    def unusual(self) -> tuple[Alert, ...]:
        """The findings that are a warning or worse."""
        return tuple(finding for finding in self.findings if finding.level != "notice")

    @property
    def not_audited(self) -> dict[str, str]:
        """Layers without numbers, and attention whose heads are not known -> the reason."""
        reported = {finding.layer for finding in self.unusual}  # weights that are NaN are a finding
        without = {layer.name: layer.absent for layer in self.layers if layer.absent and layer.name not in reported}
        return {**without, **self.refused}

    @property
    def audited(self) -> tuple[LayerAudit, ...]:
        """The layers that were judged."""
        return tuple(layer for layer in self.layers if layer.name not in self.not_audited)

    @property
    def verdict(self) -> str:
        """The result in one or two sentences."""
        read = self.audited
        left_out = f" {_count(len(self.not_audited), 'layer')} could not be audited." if self.not_audited else ""
        if not read:
            return "Nothing could be audited." if self.not_audited else "There is no attention in this model."
        if self.unusual:
            layers = {finding.layer for finding in self.unusual}
            first = self.unusual[0]
            where = f"{len(layers)} of {_count(len(read), 'layer')} {'is' if len(layers) == 1 else 'are'} unusual"
            return f"{where}. {first.layer}: {first.finding.what}.{left_out}"
        known = [(layer.worst_alignment, layer) for layer in read if layer.worst_alignment is not None]
        if not known:
            return f"Nothing unusual in {_count(len(read), 'layer')}.{left_out}"
        value, closest = max(known, key=lambda item: item[0])
        heads = " and ".join(map(str, closest.worst_pair))
        return (
            f"Nothing unusual in {_count(len(read), 'layer')}. The two closest heads are {heads} of {closest.name} "
            f"(alignment {value:.2f}).{left_out}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The audit as plain data, without the matrices.

        Returns:
            The output of ``hdi audit --json``.
        """
        return {
            "model": self.name,
            "verdict": self.verdict,
            "is_unusual": bool(self.unusual),
            "findings": [
                {"layer": finding.layer, "rule": finding.rule, "level": finding.level, **_finding(finding)}
                for finding in self.findings
            ],
            "layers": [_plain(asdict(layer)) for layer in self.layers],
            "not_audited": self.not_audited,
            "refused": dict(self.refused),
        }

    def __repr__(self) -> str:
        return f"<Audit of {self.name}: {_count(len(self.layers), 'layer')}, {len(self.unusual)} unusual>"

    def __str__(self) -> str:
        """The layers as a table, what was not audited, and the verdict."""
        rows = [_cells(layer) for layer in self.layers if not layer.absent]
        parts = [plain_table(_COLUMNS, rows)] if rows else []
        parts += [f"not audited: {name}: {reason}" for name, reason in self.not_audited.items()]
        return "\n".join([*parts, self.verdict])

    def _repr_html_(self) -> str:
        """Show the audit in a notebook: the verdict, then the unusual layers and the closest others."""
        marked = {finding.layer for finding in self.unusual}
        ranked = sorted(
            (layer for layer in self.layers if not layer.absent),
            key=lambda layer: (layer.name not in marked, -(layer.worst_alignment or 0)),
        )
        heading = "".join(f"<th style='text-align:left'>{title}</th>" for title in _COLUMNS)
        rows = "".join(
            f"<tr{_MARK if layer.name in marked else ''}>"
            + "".join(f"<td style='text-align:left'>{html.escape(cell)}</td>" for cell in _cells(layer))
            + "</tr>"
            for layer in ranked[:_MOST_ROWS]
        )
        more = f"<p>{len(ranked) - _MOST_ROWS} more layers.</p>" if len(ranked) > _MOST_ROWS else ""
        sign = "&#9888; " if self.unusual else ""
        return (
            f"<p><b>{sign}{html.escape(self.verdict)}</b></p><table><thead><tr>{heading}</tr></thead>"
            f"<tbody>{rows}</tbody></table>{more}"
        )


_MOST_ROWS = 12
_MARK = " style='font-weight:bold'"
_COLUMNS = ("layer", "heads", "closest pair", "its alignment", "mean alignment", "by energy", "HDI / chance", "dead")


def _cells(layer: LayerAudit) -> tuple[str, ...]:
    pair = " and ".join(map(str, layer.worst_pair)) or "-"
    return (
        layer.name,
        heads_in_words(layer.num_heads, layer.num_key_heads),
        pair,
        decimal(layer.worst_alignment),
        decimal(layer.alignment),
        decimal(layer.energy_alignment),
        f"{decimal(layer.hdi)} / {decimal(layer.chance)}",
        ", ".join(map(str, layer.dead_heads)) or "0",
    )


def audit(
    model: nn.Module | str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | None = None,
    model_class: str | type | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    thresholds: Mapping[str, Mapping[str, float | None]] | None = None,
    progress: Progress | None = None,
) -> Audit:
    """Judge the heads of a model or a checkpoint.

    Weights in files are read layer by layer, so that memory stays near that of one layer. No code from a file is
    executed. Heads that cannot be established without a forward are listed with the reason.

    Args:
        model: a model; or a folder that transformers wrote, a ``.safetensors`` file with its ``config.json`` beside it,
            a checkpoint of Lightning or a state dict together with `model_class`, or ``"module:function"`` that gives a
            model.
        config: the ``config.json`` of a safetensors file, or its folder, if it lies elsewhere.
        model_class: the class of the model in a checkpoint, or its name as ``"package.module:Class"``.
        include: patterns of layer names (``"encoder.*"``); only layers that match one of them.
        exclude: patterns of layer names to leave out.
        thresholds: limits of the default rules, as `HDICallback` takes them: pattern of layer names -> limits.
        progress: called before each layer with how many are done, how many there are, and its name.

    Returns:
        Layers, findings and a verdict.

    Raises:
        MisconfigurationError: if there is no such model or it cannot be opened; the message says what to write instead.

    Example:
        >>> encoder = torch.nn.TransformerEncoderLayer(d_model=32, nhead=4, batch_first=True)
        >>> found = audit(torch.nn.Sequential(encoder))
        >>> [(layer.name, layer.num_heads) for layer in found.layers], len(found.unusual)
        ([('0.self_attn', 4)], 0)
    """
    rules = choose_rules("default", thresholds)
    source = open_source(model, config=config, model_class=model_class)
    found = survey(inner_model(source.model), include=include, exclude=exclude)
    facts = tuple({**layer.facts(), "name": users_name(layer.name)} for layer in found.layers)
    check_patterns("thresholds", thresholds or (), [known["name"] for known in facts])
    step = 1 if source.step is None else source.step  # step 0 would mean fresh weights
    records: dict[str, LayerRecord] = {}
    absent: dict[str, str] = {}
    for place, (layer, known) in enumerate(zip(found.layers, facts)):
        name = known["name"]
        if progress is not None:
            progress(place, len(facts), name)
        records[name], reason = _measure(layer, name, source, step)
        if reason:
            absent[f"hdi/{name}"] = reason
    record = Record(step, records, absent, axis=step)
    # Rules ignore in a run what pretrained weights had from the start; an audit reports exactly that.
    findings = Alerts(rules, facts, pretrained=False).judge(record)
    findings += _dead_heads(record, {finding.layer for finding in findings if finding.rule == DeadHeads.name})
    findings.sort(key=lambda alert: (-LEVELS.index(alert.level), -(alert.finding.value or 0)))
    layers = tuple(
        _summarised(known, records[known["name"]], absent.get(f"hdi/{known['name']}", "")) for known in facts
    )
    refused = {users_name(refusal.name): refusal.reason for refusal in found.refused}
    return Audit(printable(source.name), layers, refused, tuple(findings), record, facts)


def _dead_heads(record: Record, reported: set[str]) -> list[Alert]:
    """Findings of dead heads; in a run the rule would wait until they had time to train."""
    found = []
    for name, layer in record.layers.items():
        heads = dead_heads_of(layer)
        if heads and name not in reported:
            what = "are dead: their key weights are" if len(heads) > 1 else "is dead: its key weights are"
            finding = Finding(f"{named_heads(heads)} {what} all but zero", value=float(len(heads)), heads=heads)
            message = f"step {record.step}, {name}: {finding.what}"
            found.append(Alert(record.step, name, DeadHeads.name, finding.level, message, finding))
    return found


def dead_heads_of(layer: LayerRecord) -> tuple[int, ...]:
    """The heads that are dead for practical purposes, from one reading.

    Args:
        layer: the numbers of a layer.

    Returns:
        Heads of rank 0, and those whose norm is at most a hundredth of the median of the others.

    Example:
        >>> dead_heads_of(LayerRecord(arrays={"rank": [4, 0, 4, 4], "head_norm": [1.0, 0.0, 1.1, 0.001]}))
        (1, 3)
    """
    ranks, norms = (layer.arrays.get(name, []) for name in ("rank", "head_norm"))
    dead = {head for head, rank in enumerate(ranks) if rank == 0}
    for head, norm in enumerate(norms):
        others = [other for place, other in enumerate(norms) if place != head and other is not None]
        if others and norm is not None and norm <= _SHARE * statistics.median(others):
            dead.add(head)
    return tuple(sorted(dead))


_SHARE = 0.01  # as in the rule for runs


def _measure(layer: AttentionLayer, name: str, source: Source, step: int) -> tuple[LayerRecord, str]:
    """The numbers of one layer, and the reason if the index is not among them."""
    try:
        with with_weights(layer, source) as missing:
            sharding = Sharding(source.model)
            weights = _weights(layer, sharding)
            if "key" not in weights:
                of_key = "; ".join(f"`{inner}`: {why}" for inner, why in missing.items())
                return LayerRecord(), of_key or "its weights are on the meta device, which holds no numbers"
            measurements = [
                Measurement((name,), measured.name, _computed(measured, layer, name, weights))
                for measured in weight_sources({FINITENESS}, LastWeights(0), rank_tol=1e-6, method="whiten")
            ]
            record = Reading(step, (name,), tuple(measurements)).record()
            del weights
    except MisconfigurationError:
        raise
    except HDIError as error:
        return LayerRecord(), first_line(error)
    except Exception as error:  # one odd layer costs itself
        return LayerRecord(), f"measuring it raises {type(error).__name__} ({first_line(error)})"
    why = record.absent.get(f"hdi/{name}", "")
    if layer.num_key_heads < 2:
        why = "it has one key head, which there is nothing to compare with"
    return record.layers[name], why


def _weights(layer: AttentionLayer, sharding: Sharding) -> dict[Role, torch.Tensor]:
    weights = {role: sharding.weight(layer, role) for role in layer.slices}
    return {role: weight for role, weight in weights.items() if not weight.is_meta}


def _computed(source: WeightSource, layer: AttentionLayer, name: str, weights: Mapping[Role, torch.Tensor]) -> Any:
    selected = {role: weights[role][None] for role in source.roles(layer) if role in weights}
    with torch.no_grad(), without_autocast(next(iter(selected.values())).device):
        return source.measure((name,), selected)


def _summarised(facts: Mapping[str, Any], record: LayerRecord, absent: str) -> LayerAudit:
    values, arrays = record.values, record.arrays

    def pair(array: str) -> tuple[int, ...]:
        return tuple(int(head) for head in arrays.get(array, ()) if head >= 0)

    return LayerAudit(
        facts["name"],
        facts["num_heads"],
        facts["num_key_heads"],
        facts["head_dim"],
        values.get("hdi"),
        values.get("hdi_chance"),
        values.get("hdi_alignment"),
        values.get("hdi_energy_alignment"),
        values.get("hdi_worst_alignment"),
        pair("worst_alignment_pair"),
        values.get("hdi_energy_worst_alignment"),
        pair("energy_worst_alignment_pair"),
        values.get("hdi_effective_heads"),
        dead_heads_of(record),
        absent,
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _finding(alert: Alert) -> dict[str, Any]:
    of_runs = ("since", "is_from_start")  # an audit has no time
    return _plain({name: value for name, value in asdict(alert.finding).items() if name not in of_runs})


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
