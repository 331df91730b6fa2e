"""Two checkpoints, or two readings of runs, compared: which layers and heads moved."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.attention import AttentionLayer, survey
from hdi_callback.attention.wrappers import inner_model, users_name
from hdi_callback.audits.audit import Progress, audit
from hdi_callback.audits.one_layer import with_weights
from hdi_callback.audits.sources import Source, open_source
from hdi_callback.audits.stored import first_line
from hdi_callback.core import head_diversity
from hdi_callback.errors import HDIError, MisconfigurationError
from hdi_callback.monitoring.history import read_records, run_lines
from hdi_callback.monitoring.history.run_folder import find_history
from hdi_callback.monitoring.plain_table import decimal, plain_table
from hdi_callback.monitoring.readings import LayerRecord, Record

_COMPARED = {
    "hdi": "hdi",
    "alignment": "hdi_alignment",
    "worst_alignment": "hdi_worst_alignment",
    "energy_alignment": "hdi_energy_alignment",
    "effective_heads": "hdi_effective_heads",
}
_ROUNDING = 1e-6
_SHOWN = ("worst_alignment", "alignment")
_HEADINGS = ("layer", "pair in A", "in B", "aligned in A", "in B", "mean in A", "in B")


@dataclass(frozen=True)
class LayerComparison:
    """One layer in both models.

    Attributes:
        name: dotted path of the layer.
        before: quantity -> its value in the first: ``hdi``, ``alignment``, ``worst_alignment``, ...
        after: the same of the second.
        pair_before: the closest two heads in the first.
        pair_after: the closest two heads in the second.
        moved: how far each key head moved: 0 not at all, 1 as far as an independent random head. It is 1 - alignment of
            the head with its earlier self; empty for histories.
        moved_heads: heads by how far they moved, the furthest first; for histories, by the change of their largest
            overlap with another head.
    """

    name: str
    before: Mapping[str, float]
    after: Mapping[str, float]
    pair_before: tuple[int, ...] = ()
    pair_after: tuple[int, ...] = ()
    moved: tuple[float, ...] = ()
    moved_heads: tuple[int, ...] = ()

    def change(self, quantity: str = "worst_alignment") -> float:
        """The change of a quantity.

        Args:
            quantity: one of those in `before` and `after`.

        Returns:
            Second minus first; NaN if one of them is not known.
        """
        return self.after.get(quantity, float("nan")) - self.before.get(quantity, float("nan"))


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
    not_compared: Mapping[str, str] | None = None

    @property
    def summary(self) -> str:
        """The largest differences in one or two sentences."""
        if not self.layers:
            return "No layer could be compared."
        top = self.layers[0]
        if _size_of_change(top) < _ROUNDING:
            return f"Nothing differs in {len(self.layers)} layers.{self._only_in_one()}"
        pair = " and ".join(map(str, top.pair_after))
        closest = top.after.get("worst_alignment")
        now = f"; heads {pair} are the closest there now" if pair and closest is not None else ""
        heads = f"; head {top.moved_heads[0]} moved most" if top.moved_heads else ""
        before, after = decimal(top.before.get("worst_alignment")), decimal(closest)
        change = f"went from {before} to {after}{now}" if before != after else f"stays at {after}"
        return f"{top.name} changed most: the alignment of its closest pair {change}{heads}.{self._only_in_one()}"

    def _only_in_one(self) -> str:
        sides = (("A", self.only_in_first), ("B", self.only_in_second))
        return "".join(
            f" {len(names)} layer{'s are' if len(names) > 1 else ' is'} only in {side}."
            for side, names in sides
            if names
        )

    def __repr__(self) -> str:
        return f"<Comparison of {self.first} and {self.second}: {len(self.layers)} layers>"

    def __str__(self) -> str:
        """The layers as a table, what only one of the two has, and the summary."""
        rows = [
            (
                layer.name,
                *("-".join(map(str, pair)) or "-" for pair in (layer.pair_before, layer.pair_after)),
                *(decimal(side.get(name)) for name in _SHOWN for side in (layer.before, layer.after)),
            )
            for layer in self.layers
        ]
        parts = [f"A  {self.first}\nB  {self.second}", *([plain_table(_HEADINGS, rows)] if rows else [])]
        for which, names in (("A", self.only_in_first), ("B", self.only_in_second)):
            parts += [f"only in {which}: {', '.join(names)}"] if names else []
        parts += [f"not compared: {name}: {reason}" for name, reason in (self.not_compared or {}).items()]
        return "\n".join([*parts, self.summary])

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain data.

        Returns:
            The output of ``hdi compare --json``.
        """
        return {
            "first": self.first,
            "second": self.second,
            "summary": self.summary,
            "layers": [
                {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(layer).items()}
                for layer in self.layers
            ],
            "only_in_first": list(self.only_in_first),
            "only_in_second": list(self.only_in_second),
            "not_compared": dict(self.not_compared or {}),
        }


def compare(
    first: nn.Module | str | os.PathLike[str],
    second: nn.Module | str | os.PathLike[str],
    *,
    model_class: str | type | None = None,
    config: str | os.PathLike[str] | None = None,
    step: int | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compare the layers and heads of two checkpoints, or two runs.

    Args:
        first: a model or a checkpoint, as `audit` takes it, or the history file of a run.
        second: the same; both are histories, or none is.
        model_class: see `audit`.
        config: see `audit`.
        step: for histories, the last reading up to this step is compared; by default the last one.
        progress: see `audit`.

    Returns:
        The layers of both, most changed first.

    Raises:
        MisconfigurationError: if one is a history and the other is none, or one cannot be opened.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.TransformerEncoderLayer(d_model=32, nhead=4, batch_first=True))
        >>> same = compare(model, model)
        >>> [(layer.name, layer.change("hdi")) for layer in same.layers]
        [('0.self_attn', 0.0)]
    """
    histories = [_history_of(source) for source in (first, second)]
    if histories[0] is not None and histories[1] is not None:
        before, after = (_reading(history, step) for history in histories if history is not None)
        return _compare_records(before, after, str(first), str(second))
    if histories[0] is not None or histories[1] is not None:
        run, no_run = (first, second) if histories[0] is not None else (second, first)
        if isinstance(no_run, str | os.PathLike) and ":" not in str(no_run) and not Path(no_run).expanduser().exists():
            find_history(no_run)  # raises an error that the path does not exist
        named = type(no_run).__name__ if isinstance(no_run, nn.Module) else no_run
        raise MisconfigurationError(f"`{run}` is a run and `{named}` is none: write two of one kind.")
    a, b = (audit(source, config=config, model_class=model_class, progress=progress) for source in (first, second))
    moved, reasons = _moved(
        open_source(first, config=config, model_class=model_class),
        open_source(second, config=config, model_class=model_class),
    )
    found = _compare_records(a.record, b.record, a.name, b.name, moved)
    return Comparison(
        found.first, found.second, found.layers, found.only_in_first, found.only_in_second,
        {**(found.not_compared or {}), **a.not_audited, **b.not_audited, **reasons},
    )  # fmt: skip


def _history_of(what: Any) -> Path | None:
    """The history, if this is a run; a folder with a config.json is a model."""
    if isinstance(what, nn.Module) or not isinstance(what, str | os.PathLike):
        return None
    path = Path(what).expanduser()
    if path.is_file():
        return path if path.suffix == ".jsonl" and run_lines(path) else None
    return find_history(path) if path.is_dir() and not (path / "config.json").is_file() else None


def _reading(path: Path, step: int | None) -> Record:
    records = [record for record in read_records(path) if step is None or record.step <= step]
    if not records:
        raise MisconfigurationError(f"`{path}` has no reading{'' if step is None else f' up to step {step}'}.")
    return records[-1]


def _compare_records(
    a: Record, b: Record, first: str, second: str, moved: Mapping[str, Sequence[float]] | None = None
) -> Comparison:
    layers: list[LayerComparison] = []
    without: dict[str, str] = {}
    for name in (name for name in a.layers if name in b.layers):
        before, after = a.layers[name], b.layers[name]
        if not before.values or not after.values:
            without[name] = "it has no numbers in one of them"
            continue
        found = _compare_layer(name, before, after, (moved or {}).get(name, ()))
        sides = [side for side, of in (("A", found.before), ("B", found.after)) if "alignment" not in of]
        if sides and not found.moved:
            without[name] = f"no two of its heads were compared in {' and '.join(sides)}"
        else:
            layers.append(found)
    layers.sort(key=_size_of_change, reverse=True)
    return Comparison(
        first,
        second,
        tuple(layers),
        tuple(name for name in a.layers if name not in b.layers),
        tuple(name for name in b.layers if name not in a.layers),
        without,
    )


def _size_of_change(layer: LayerComparison) -> float:
    changes = [abs(layer.change(name)) for name in ("worst_alignment", "alignment", "energy_alignment")]
    return max((change for change in changes if change == change), default=0.0) + 1e-3 * max(layer.moved, default=0.0)


def _compare_layer(name: str, a: LayerRecord, b: LayerRecord, moved: Sequence[float]) -> LayerComparison:
    def values(record: LayerRecord) -> dict[str, float]:
        return {ours: record.values[metric] for ours, metric in _COMPARED.items() if metric in record.values}

    def pair(record: LayerRecord) -> tuple[int, ...]:
        return tuple(int(head) for head in record.arrays.get("worst_alignment_pair", ()) if head >= 0)

    distance = list(moved)
    if not distance:
        x, y = (record.arrays.get("nearest_overlap", []) for record in (a, b))
        distance = [abs((q or 0) - (p or 0)) for p, q in zip(x, y)] if len(x) == len(y) else []
    ranked = sorted(range(len(distance)), key=lambda head: -distance[head])
    heads = tuple(head for head in ranked if distance[head] > 0)
    return LayerComparison(name, values(a), values(b), pair(a), pair(b), tuple(moved), heads)


def _moved(a: Source, b: Source) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Distance that each key head moved."""
    ones, others = (
        {users_name(layer.name): layer for layer in survey(inner_model(source.model)).layers} for source in (a, b)
    )
    moved: dict[str, list[float]] = {}
    reasons: dict[str, str] = {}
    for name, layer in ones.items():
        if name not in others:
            continue
        try:
            keys, other = _keys(layer, a), _keys(others[name], b)
            if keys.is_meta or other.is_meta:
                continue
            if keys.shape != other.shape:
                reasons[name] = f"its keys are {tuple(keys.shape)} in one and {tuple(other.shape)} in the other"
                continue
            # One pair for each head: the same head in both models.
            both = head_diversity(torch.stack([keys.float(), other.float()], 1))
            # For a head that did not move the rounding of the products remains.
            moved[name] = [max(0.0, round(1 - float(value), 4)) for value in both.alignment]
        except HDIError as error:
            reasons[name] = first_line(error)
    return moved, reasons


def _keys(layer: AttentionLayer, source: Source) -> Tensor:
    with with_weights(layer, source):
        return layer.weight("key").detach().clone()
