"""`compare`: which layers and heads differ in two checkpoints, or in two runs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from hdi_callback.arguments import file_path, whole_number
from hdi_callback.attention import AttentionLayer
from hdi_callback.audits.audit import measure_weights, missing_weights, open_layers
from hdi_callback.audits.sources import Target
from hdi_callback.dashboards.layer_table import closest_pair, compared, name_heads, name_layers, table_lines
from hdi_callback.errors import MisconfigurationError
from hdi_callback.history import RunHistory, load_history
from hdi_callback.record import Record
from hdi_callback.rules.words import listed

_COMPARED = ("hdi", "hdi_alignment", "hdi_worst_alignment", "hdi_energy_alignment")
_HEADINGS = ("layer", "pair in A", "in B", "aligned in A", "in B", "changed most")
_SAME = 1e-6  # change of an alignment
_MOST_ROWS = 20  # layers in the table


@dataclass(frozen=True)
class LayerComparison:
    """One layer in both models.

    Attributes:
        name: dotted path of the layer.
        before: metric -> its value in the first.
        after: the same of the second.
        pair_before: the closest two heads in the first.
        pair_after: the closest two heads in the second.
        unit: what is compared: ``"heads"``, or ``"key heads"`` where several heads share their keys.
        changes: role -> how far the weights of each head of a checkpoint are from those of the first, as a share of
            their norm; 0 if they are equal bit by bit. Empty for runs.
        broken: clauses that name heads whose weights are not finite, or zero, in one of the two.
    """

    name: str
    before: Mapping[str, float]
    after: Mapping[str, float]
    pair_before: tuple[int, ...] = ()
    pair_after: tuple[int, ...] = ()
    unit: str = "heads"
    changes: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    broken: tuple[str, ...] = ()

    def change(self, metric: str = "hdi_worst_alignment") -> float:
        """Return the second value of a metric less the first; NaN if one of them is not known."""
        return self.after.get(metric, float("nan")) - self.before.get(metric, float("nan"))

    @property
    def size(self) -> float:
        """How much has changed, to rank layers: what is broken first, then by weights, of runs by alignments."""
        shares = [share for of_role in self.changes.values() for share in of_role if share == share]
        alignments = [abs(self.change(metric)) for metric in _COMPARED[1:]]
        if self.broken:
            return math.inf
        return max(shares or (change for change in alignments if change == change), default=0.0)

    @property
    def most_changed(self) -> tuple[str, int, float] | None:
        """The role and the head whose weights changed most, and by how much; `None` if all are equal, or unknown."""
        every = [
            (role, head, share)
            for role, shares in self.changes.items()
            for head, share in enumerate(shares)
            if 0 < share < math.inf
        ]
        return max(every, key=lambda change: change[2], default=None)


@dataclass(frozen=True, repr=False)
class Comparison:
    """The differences between two checkpoints, or two runs.

    Attributes:
        first: name of the first.
        second: name of the second.
        layers: the layers of both, most changed first.
        only_in_first: layers that the second does not have.
        only_in_second: layers that the first does not have.
        not_compared: layers of both, and their weights, that could not be compared -> the reason.
        others: names of the other parameters of checkpoints that differ, or are only in one of them.
        equal_numbers: of runs: whether all numbers of the two readings are equal.
    """

    first: str
    second: str
    layers: tuple[LayerComparison, ...]
    only_in_first: tuple[str, ...] = ()
    only_in_second: tuple[str, ...] = ()
    not_compared: Mapping[str, str] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    equal_numbers: bool = False

    @property
    def summary(self) -> str:
        """The largest difference in a sentence or two."""
        if not self.layers:
            return "Nothing to compare: no layer could be read in both."
        count = f"{len(self.layers)} layer{'s' if len(self.layers) > 1 else ''}"
        broken: dict[str, list[str]] = {}
        for layer in self.layers:
            for clause in layer.broken:
                broken.setdefault(clause, []).append(layer.name)
        first = [f"{name_layers(names)}: {clause}." for clause, names in broken.items()]
        changed = [layer for layer in self.layers if layer.most_changed or (not layer.changes and layer.size > _SAME)]
        if changed:
            first.append(self._most(max(changed, key=lambda layer: (layer.most_changed or ("", 0, 0.0))[2])))
        elif self.is_of_weights and not broken:
            roles = listed(list(dict.fromkeys(role for layer in self.layers for role in layer.changes)))
            first.append(f"The {roles} weights that are in both are equal bit by bit, in {count}.")
        elif not self.is_of_weights:
            scope = "All numbers" if self.equal_numbers else "Alignments agree and other numbers do not: those"
            first.append(f"{scope} of these readings {'agree' if self.equal_numbers else 'differ'}, in {count}.")
            first.append("A history has no weights.")
        if self.others:
            more = f" and {len(self.others) - 3} more" if len(self.others) > 3 else ""
            first.append(f"Of the other parameters {len(self.others)} differ: {', '.join(self.others[:3])}{more}.")
        elif self.is_of_weights:
            first.append("All other parameters are equal.")
        if self.not_compared:
            name, reason = next(iter(self.not_compared.items()))
            more = f", and {len(self.not_compared) - 1} more" if len(self.not_compared) > 1 else ""
            first.append(f"Not compared: {name} ({reason}){more}.")
        return " ".join(first) + self._only_in_one()

    def _most(self, top: LayerComparison) -> str:
        before, after = (_decimal(side.get("hdi_worst_alignment")) for side in (top.before, top.after))
        change = f"stays at {after}" if before == after else f"went from {before} to {after}"
        pair = f" ({name_heads(top.pair_after, unit=top.unit)})" if top.pair_after else ""
        clauses = [f"the alignment of its closest pair {change}{pair}"] if after != "-" else []
        if top.most_changed is not None:
            role, head, share = top.most_changed
            clauses.insert(0, f"the {role} weights of head {head} by {share:.3g} of their norm")
        return f"{top.name} changed most: {'; '.join(clauses)}."

    @property
    def is_of_weights(self) -> bool:
        """Whether two checkpoints were compared, and not two runs."""
        return any(layer.changes for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain data: what ``hdi compare --json`` prints."""
        return {**asdict(self), "summary": self.summary}

    def __repr__(self) -> str:
        """The table of the layers that changed most, what is only in one of the two, and the summary."""
        rows = []
        for layer in self.layers[:_MOST_ROWS]:
            pairs = ("-".join(map(str, pair)) or "-" for pair in (layer.pair_before, layer.pair_after))
            numbers = (_decimal(side.get("hdi_worst_alignment")) for side in (layer.before, layer.after))
            most = layer.most_changed
            rows.append([layer.name, *pairs, *numbers, "-" if most is None else f"{most[0]} {most[1]} ({most[2]:.2f})"])
        lines = [f"A  {self.first}", f"B  {self.second}", ""]
        columns = len(_HEADINGS) - (not self.is_of_weights)
        lines += table_lines(_HEADINGS[:columns], [row[:columns] for row in rows]) if rows else []
        if len(self.layers) > _MOST_ROWS:
            lines.append(f"{len(self.layers) - _MOST_ROWS} more layers changed less.")
        for side, names in (("A", self.only_in_first), ("B", self.only_in_second)):
            lines += [f"only in {side}: {', '.join(names)}"] if names else []
        lines += [f"not compared: {name}: {reason}" for name, reason in self.not_compared.items()]
        return "\n".join([*lines, "", self.summary])

    def _only_in_one(self) -> str:
        sides = (("A", self.only_in_first), ("B", self.only_in_second))
        return "".join(
            f" {len(names)} layer{'s are' if len(names) > 1 else ' is'} only in {side}."
            for side, names in sides
            if names
        )


def compare(
    first: nn.Module | str | os.PathLike[str],
    second: nn.Module | str | os.PathLike[str],
    *,
    step: int | None = None,
    model: str | Callable[..., Any] | None = None,
) -> Comparison:
    """Compare the layers and heads of two checkpoints, or two runs.

    Args:
        first: a model or a checkpoint, as `audit` takes it, or the history of a run, or its folder.
        second: the same; either both are runs, or neither is.
        step: compare runs at their last reading up to this step; by default at the last one.
        model: see `audit`.

    Returns:
        The layers of both, most changed first.

    Raises:
        MisconfigurationError: if one is a run and the other is not, or one cannot be opened.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.TransformerEncoderLayer(d_model=32, nhead=4, batch_first=True))
        >>> [(layer.name, layer.change("hdi")) for layer in compare(model, model).layers]
        [('0.self_attn', 0.0)]
    """
    if step is not None:
        whole_number("step", step, least=0, example=1000)
    runs = [_is_run(source) for source in (first, second)]
    if all(runs):
        return _compare_runs([load_history(first), load_history(second)], step)  # type: ignore[arg-type]
    if any(runs):
        run, model_source = (first, second) if runs[0] else (second, first)
        other_name = type(model_source).__name__ if isinstance(model_source, nn.Module) else model_source
        raise MisconfigurationError(f"`{run}` is a run and `{other_name}` is not: compare two runs, or two models.")
    targets, layers, records = [], [], []
    units: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for source in (first, second):
        target, of_target, refused = open_layers(source, model=model)
        targets.append(target)
        layers.append({layer.name: layer for layer in of_target})
        records.append(measure_weights(target, of_target, step=1))
        units |= {layer.name: compared(layer.facts()) for layer in of_target}
        reasons |= refused
    changes: dict[str, dict[str, tuple[float, ...]]] = {}
    broken: dict[str, list[str]] = {}
    for name in (name for name in layers[0] if name in layers[1]):
        for role in dict.fromkeys(role for of_target in layers for role in of_target[name].weights):
            weights = [_weight(target, of_target[name], role) for target, of_target in zip(targets, layers)]
            before, after = weights
            if not isinstance(before, Tensor) or not isinstance(after, Tensor):
                reasons[f"{role} of {name}"] = next(weight for weight in weights if isinstance(weight, str))
            elif before.shape != after.shape:
                shapes = f"{tuple(before.shape)} in A and {tuple(after.shape)} in B"
                reasons[f"{role} of {name}"] = f"its weights are {shapes}"
            else:
                changes.setdefault(name, {})[role] = _shares(before, after)
                broken.setdefault(name, []).extend(_broken(role, before, after))
    of_heads = {
        id(parameter)
        for name in changes
        for weight in layers[0][name].weights.values()
        for parameter in weight.parameters()
    }
    names = [target.name for target in targets]
    comparison = _compare_records(names, records, units, changes, broken, reasons)
    return replace(comparison, others=_others(targets[0], targets[1], of_heads))


def _weight(target: Target, layer: AttentionLayer, role: str) -> Tensor | str:
    """Return the weights of a role, or why there are none."""
    if role not in layer.weights:
        return "they are not read in one of the two"
    return missing_weights(target, layer, [role]) or layer.weights[role].tensor().detach().float().cpu()


def _shares(before: Tensor, after: Tensor) -> tuple[float, ...]:
    """How far the weights of each head are apart, as a share of the norm of the first; NaN where it is not finite."""
    apart, norms = (after - before).flatten(1).norm(dim=1), before.flatten(1).norm(dim=1)
    return tuple((apart / norms.clamp_min(1e-30)).masked_fill((before == after).flatten(1).all(1), 0.0).tolist())


def _broken(role: str, before: Tensor, after: Tensor) -> list[str]:
    """Name heads that are not finite, or zero."""
    clauses = []
    for fault in ("not finite", "zero"):
        heads_of_first, heads_of_second = (_heads_that_are(fault, weight) for weight in (before, after))
        sides = {"A and B": heads_of_first & heads_of_second, "A": heads_of_first - heads_of_second}
        for side, heads in {**sides, "B": heads_of_second - heads_of_first}.items():
            if heads:
                clauses.append(f"the {role} weights of {name_heads(sorted(heads), len(before))} are {fault} in {side}")
    return clauses


def _heads_that_are(fault: str, weight: Tensor) -> set[int]:
    rows = weight.flatten(1)
    return set(
        ((rows == 0) if fault == "zero" else ~rows.isfinite().all(1, keepdim=True)).all(1).nonzero().flatten().tolist()
    )


def _others(first: Target, second: Target, of_heads: Collection[int]) -> tuple[str, ...]:
    """Name parameters that differ, or are in one alone, beside the weights of heads."""
    ours, theirs = (dict(side.model.named_parameters()) for side in (first, second))
    names = [name for name in ours if name not in theirs] + [name for name in theirs if name not in ours]
    for name in (name for name in ours if name in theirs):
        before, after = ours[name].detach(), theirs[name].detach()
        if id(ours[name]) in of_heads:
            continue
        if before.is_meta or after.is_meta or before.shape != after.shape:
            is_equal = before.is_meta and after.is_meta
        else:
            before, after = before.cpu(), after.cpu()
            is_equal = bool(((before == after) | (before.isnan() & after.isnan())).all())
        names += [] if is_equal else [name]
    return tuple(names)


def _is_run(source: Any) -> bool:
    """Whether this is the history of a run, or its folder; a folder with a config.json is a model."""
    if isinstance(source, nn.Module):
        return False
    path = file_path("run", source, "runs/a")
    if path.is_dir():
        return not (path / "config.json").is_file() and next(path.rglob("history*.jsonl"), None) is not None
    return path.is_file() and path.suffix == ".jsonl"


def _compare_runs(runs: Sequence[RunHistory], step: int | None) -> Comparison:
    records = [_reading(run, step) for run in runs]
    units = {facts["name"]: compared(facts) for run in runs for facts in run.layers}
    broken = {
        name: [
            f"weights of {record.layers[name].values['weights_not_finite']:g} heads are not finite in {side}"
            for side, record in zip("AB", records)
            if name in record.layers and record.layers[name].values.get("weights_not_finite")
        ]
        for name in records[0].layers
    }
    comparison = _compare_records([str(run.path) for run in runs], records, units, {}, broken, {})
    before, after = (record.layers for record in records)
    is_equal = all(before[layer.name].values == after[layer.name].values for layer in comparison.layers)
    return replace(comparison, equal_numbers=is_equal)


def _reading(run: RunHistory, step: int | None) -> Record:
    records = [record for record in run.records if step is None or record.step <= step]
    if not records:
        raise MisconfigurationError(f"`{run.path}` has no reading{'' if step is None else f' up to step {step}'}.")
    return records[-1]


def _compare_records(
    names: Sequence[str],
    records: Sequence[Record],
    units: Mapping[str, str],
    changes: Mapping[str, Mapping[str, tuple[float, ...]]],
    broken: Mapping[str, Sequence[str]],
    reasons: Mapping[str, str],
) -> Comparison:
    first, second = records
    layers: list[LayerComparison] = []
    not_compared = dict(reasons)
    for name in (name for name in first.layers if name in second.layers):
        before, after = _compared(first, name), _compared(second, name)
        if name not in changes and not ("hdi_alignment" in before and "hdi_alignment" in after):
            not_compared.setdefault(name, "no two of its heads were compared in both")
            continue
        pairs, of_roles = (closest_pair(first, name), closest_pair(second, name)), changes.get(name, {})
        layers.append(LayerComparison(name, before, after, *pairs, units[name], of_roles, tuple(broken.get(name, ()))))
    layers.sort(key=lambda layer: -layer.size)
    only_in_first = tuple(name for name in first.layers if name not in second.layers)
    only_in_second = tuple(name for name in second.layers if name not in first.layers)
    return Comparison(names[0], names[1], tuple(layers), only_in_first, only_in_second, not_compared)


def _compared(record: Record, layer: str) -> dict[str, float]:
    values = record.layers[layer].values
    return {metric: values[metric] for metric in _COMPARED if metric in values}


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
