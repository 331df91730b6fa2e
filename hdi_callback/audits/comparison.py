"""`compare`: which layers and heads differ in two checkpoints, or in two runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.audits.audit import measure_weights, open_layers
from hdi_callback.core import head_diversity
from hdi_callback.dashboards.layer_table import closest_pair, compared, name_heads, table_lines
from hdi_callback.errors import MisconfigurationError
from hdi_callback.history import RunHistory, load_history
from hdi_callback.record import Record

_COMPARED = ("hdi", "hdi_alignment", "hdi_worst_alignment", "hdi_energy_alignment")
_ROUNDING = 1e-3  # of matrices in a history, and of products of weights
_HEADINGS = ("layer", "pair in A", "in B", "aligned in A", "in B", "moved most")
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
        moved: how far each key head moved. Of checkpoints it is 1 - alignment of the head with its earlier self: 0 not
            at all, 1 as far as an independent head. Of runs it is the mean change of its alignments with the other
            heads, as a history has no weights; empty where one has no matrices.
        unit: what is compared: ``"heads"``, or ``"key heads"`` where several heads share their keys.
    """

    name: str
    before: Mapping[str, float]
    after: Mapping[str, float]
    pair_before: tuple[int, ...] = ()
    pair_after: tuple[int, ...] = ()
    moved: tuple[float, ...] = ()
    unit: str = "heads"

    def change(self, metric: str = "hdi_worst_alignment") -> float:
        """Return the second value of a metric less the first; NaN if one of them is not known."""
        return self.after.get(metric, float("nan")) - self.before.get(metric, float("nan"))

    @property
    def size(self) -> float:
        """How much has changed, to rank layers: the largest change of an alignment, then of a head."""
        changes = [abs(self.change(metric)) for metric in _COMPARED[1:]]
        return max((one for one in changes if one == one), default=0.0) + 1e-3 * max(self.moved, default=0.0)

    @property
    def most_moved(self) -> int | None:
        """The head that moved most; `None` if none did, or it is not known."""
        furthest = max(self.moved, default=0.0)
        return self.moved.index(furthest) if furthest > _ROUNDING else None


@dataclass(frozen=True, repr=False)
class Comparison:
    """The differences between two checkpoints, or two runs.

    Attributes:
        first: name of the first.
        second: name of the second.
        layers: the layers of both, most changed first.
        only_in_first: layers that the second does not have.
        only_in_second: layers that the first does not have.
        not_compared: layers of both that could not be compared -> the reason.
    """

    first: str
    second: str
    layers: tuple[LayerComparison, ...]
    only_in_first: tuple[str, ...] = ()
    only_in_second: tuple[str, ...] = ()
    not_compared: Mapping[str, str] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """The largest difference in a sentence or two."""
        if not self.layers:
            return "Nothing to compare: no layer could be read in both."
        top = self.layers[0]
        if top.size < _ROUNDING * _ROUNDING:
            return f"Nothing differs in {len(self.layers)} layers.{self._only_in_one()}"
        before, after = (side.get("hdi_worst_alignment") for side in (top.before, top.after))
        change = f"went from {_decimal(before)} to {_decimal(after)}"
        if _decimal(before) == _decimal(after):
            change = f"stays at {_decimal(after)}"
        pair = f" ({name_heads(top.pair_after, unit=top.unit)})" if top.pair_after else ""
        head = "" if top.most_moved is None else f"; {name_heads([top.most_moved], unit=top.unit)} moved most"
        return f"{top.name} changed most: the alignment of its closest pair {change}{pair}{head}.{self._only_in_one()}"

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain data: what ``hdi compare --json`` prints."""
        return {**asdict(self), "summary": self.summary}

    def __repr__(self) -> str:
        """The table of the layers that changed most, what is only in one of the two, and the summary."""
        rows = []
        for layer in self.layers[:_MOST_ROWS]:
            pairs = ("-".join(map(str, pair)) or "-" for pair in (layer.pair_before, layer.pair_after))
            numbers = (_decimal(side.get("hdi_worst_alignment")) for side in (layer.before, layer.after))
            head = layer.most_moved
            moved = "-" if head is None else f"{head} ({layer.moved[head]:.2f})"
            rows.append([layer.name, *pairs, *numbers, moved])
        lines = [f"A  {self.first}", f"B  {self.second}", ""]
        lines += table_lines(_HEADINGS, rows) if rows else []
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
    config: str | os.PathLike[str] | None = None,
) -> Comparison:
    """Compare the layers and heads of two checkpoints, or two runs.

    Args:
        first: a model or a checkpoint, as `audit` takes it, or the history of a run, or its folder.
        second: the same; either both are runs, or neither is.
        step: compare runs at their last reading up to this step; by default at the last one.
        model: see `audit`.
        config: see `audit`.

    Returns:
        The layers of both, most changed first.

    Raises:
        MisconfigurationError: if one is a run and the other is not, or one cannot be opened.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.TransformerEncoderLayer(d_model=32, nhead=4, batch_first=True))
        >>> [(layer.name, layer.change("hdi")) for layer in compare(model, model).layers]
        [('0.self_attn', 0.0)]
    """
    runs = [_is_run(source) for source in (first, second)]
    if all(runs):
        return _compare_runs(load_history(first), load_history(second), step)  # type: ignore[arg-type]
    if any(runs):
        run, other = (first, second) if runs[0] else (second, first)
        named = type(other).__name__ if isinstance(other, nn.Module) else other
        raise MisconfigurationError(f"`{run}` is a run and `{named}` is not: compare two runs, or two models.")
    sides = []
    facts: list[Mapping[str, Any]] = []
    reasons: dict[str, str] = {}
    for source in (first, second):
        target, layers, refused = open_layers(source, model=model, config=config)
        record = measure_weights(target, layers, step=1)
        sides.append((target.name, {layer.name: layer for layer in layers}, record))
        facts += [layer.facts() for layer in layers]
        reasons |= refused
    (name, ours, before), (other_name, theirs, after) = sides
    moved: dict[str, list[float]] = {}
    for layer in (
        layer for layer in ours if layer in theirs and before.layers[layer].values and after.layers[layer].values
    ):
        keys, other_keys = ours[layer].weight("key").detach(), theirs[layer].weight("key").detach()
        if keys.shape == other_keys.shape:
            moved[layer] = _moved(keys, other_keys)
        else:
            reasons[layer] = f"its keys are {tuple(keys.shape)} in A and {tuple(other_keys.shape)} in B"
    return _compare_records(name, before, other_name, after, facts, moved, reasons)


def _is_run(source: Any) -> bool:
    """Whether this is the history of a run, or its folder; a folder with a config.json is a model."""
    if isinstance(source, nn.Module):
        return False
    path = Path(source).expanduser()
    if path.is_dir():
        return not (path / "config.json").is_file() and next(path.rglob("history*.jsonl"), None) is not None
    return path.is_file() and path.suffix == ".jsonl"


def _compare_runs(a: RunHistory, b: RunHistory, step: int | None) -> Comparison:
    before, after = _reading(a, step), _reading(b, step)
    ours, theirs = a.matrices(before.step), b.matrices(after.step)
    moved = {
        name: _changed(ours[name]["pair_alignment"], theirs[name]["pair_alignment"])
        for name in ours
        if "pair_alignment" in ours[name] and "pair_alignment" in theirs.get(name, {})
    }
    return _compare_records(str(a.path), before, str(b.path), after, a.layers, moved, {})


def _reading(run: RunHistory, step: int | None) -> Record:
    records = [record for record in run.records if step is None or record.step <= step]
    if not records:
        raise MisconfigurationError(f"`{run.path}` has no reading{'' if step is None else f' up to step {step}'}.")
    return records[-1]


def _moved(before: Tensor, after: Tensor) -> list[float]:
    """How far each head moved: ``(H, d_k, d)`` twice -> 1 - alignment of each head with its earlier self."""
    both = head_diversity(torch.stack([before.float(), after.float()], 1))  # one pair of heads for each head
    return [max(0.0, round(1 - float(value), 4)) for value in both.subspace.alignment]


def _changed(before: Tensor, after: Tensor) -> list[float]:
    """How much the alignments of each head with the others changed, ``(H, H)`` twice."""
    # Where one head becomes a copy of another, both have a new alignment with each other; only the copy has new ones
    # with all the rest.
    if before.shape != after.shape:
        return []
    H = before.shape[-1]
    change = (after - before).nan_to_num(0).abs().fill_diagonal_(0)
    return [float(value) / max(H - 1, 1) for value in change.sum(-1)]


def _compare_records(
    first: str,
    a: Record,
    second: str,
    b: Record,
    facts: Sequence[Mapping[str, Any]],
    moved: Mapping[str, Sequence[float]],
    reasons: Mapping[str, str],
) -> Comparison:
    units = {one["name"]: compared(one) for one in facts}
    layers: list[LayerComparison] = []
    without = dict(reasons)
    for name in (name for name in a.layers if name in b.layers):
        before, after = _compared(a, name), _compared(b, name)
        if not ("hdi_alignment" in before and "hdi_alignment" in after) and not moved.get(name):
            without.setdefault(name, "no two of its heads were compared in both")
            continue
        pairs = closest_pair(a, name), closest_pair(b, name)
        layers.append(LayerComparison(name, before, after, *pairs, tuple(moved.get(name, ())), units[name]))
    layers.sort(key=lambda layer: -layer.size)
    only_in_first = tuple(name for name in a.layers if name not in b.layers)
    only_in_second = tuple(name for name in b.layers if name not in a.layers)
    return Comparison(first, second, tuple(layers), only_in_first, only_in_second, without)


def _compared(record: Record, layer: str) -> dict[str, float]:
    values = record.layers[layer].values
    return {metric: values[metric] for metric in _COMPARED if metric in values}


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
