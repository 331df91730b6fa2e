"""One measurement over several ranks: every rank measures a share of the weights and its own tokens, and all add up.

A failure before a sum leaves zeros or NaN in it, so that every rank takes part with the same shapes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from hdi_callback.attention import AttentionLayer
from hdi_callback.monitoring.absent import Absent, absence_of
from hdi_callback.monitoring.layers import WatchedLayers
from hdi_callback.monitoring.monitor.output_sums import OutputSums
from hdi_callback.monitoring.monitor.outputs import HeadOutputs
from hdi_callback.monitoring.monitor.rotation import LayerRotation
from hdi_callback.monitoring.monitor.rows import AttentionReadings
from hdi_callback.monitoring.monitor.weights import Heads, WeightReader, WeightSource
from hdi_callback.monitoring.ranks.roster import Roster
from hdi_callback.monitoring.readings import Measurement
from hdi_callback.monitoring.warn_once import WarnOnce


def measure_over_ranks(
    roster: Roster,
    layers: WatchedLayers,
    reader: WeightReader,
    sources: Sequence[WeightSource],
    outputs: HeadOutputs | None,
    rows: AttentionReadings | None,
    absent: Absent,
    warn_once: WarnOnce,
    rotation: LayerRotation,
) -> list[Measurement]:
    """Measure with other ranks; every one of them calls this at the same reading.

    Args:
        roster: the layers of all ranks that measure together.
        layers: those that are watched on this rank.
        reader: reads their weights.
        sources: the sources that are computed from weights.
        outputs: captured head outputs; `None` if they are not asked for.
        rows: observed attention; `None` if its rows are not asked for.
        absent: notes what cannot be measured.
        warn_once: warns once of each kind of failure.
        rotation: which layers this reading skips.

    Returns:
        The whole measurement, on every rank.
    """
    device, ranks = layers.device(), roster.ranks
    every = roster.layers(layers.all)
    captured = [] if outputs is None else roster.captured(layers.all, "outputs")
    shares = [] if outputs is None else outputs.shares(captured, ranks, device)
    mine = {layer.name for place, layer in enumerate(layers.all) if ranks.takes(place)}
    elsewhere = {name: why for name, why in roster.contradicted.items() if not layers.is_contradicted(name)}
    sheets = [_SharedResults(source, every, device) for source in sources]
    found: list[tuple[_SharedResults, Absent, list[Measurement]]] = []
    skipped = {source.name: rotation.skipped(source.name) for source in sources}
    with reader.gathers.planned(ranks, reader.gathered_for((source, skipped[source.name]) for source in sources)):
        for sheet in sheets:
            missing = Absent(warn_once, quiet_sources=absent.quiet_sources)
            found.append((sheet, missing, reader.measure(sheet.source, missing, ranks, skipped[sheet.source.name])))
    for sheet, missing, of_source in found:
        waiting = skipped[sheet.source.name]
        sheet.fill(of_source, mine)
        missing.reasons.update({absence_of(sheet.source.name, name): why for name, why in elsewhere.items()})
        unmeasured = {name for name in roster.names if absence_of(sheet.source.name, name) in missing.reasons}
        sheet.absent = unmeasured | waiting
        absent.reasons.update(missing.reasons)
    sums: list[OutputSums] = []
    if outputs is not None:
        sums = outputs.sums(captured, shares, ranks, device, absent)
    flat = [tensor for sheet in sheets for tensor in sheet.tensors()]
    added = iter(ranks.sum(flat + [tensor for item in sums for tensor in item.tensors()], device))
    measurements = [found for sheet in sheets for found in sheet.read(added)]
    totals = [item.added_up(added) for item in sums]
    left_out = {layer.name for layer in every if layer.name in elsewhere or layers.is_contradicted(layer.name)}
    if outputs is not None:
        kept = [layer.name not in left_out for layer in captured]
        measurements += outputs.read_sums(captured, kept, totals, absent, measurements)
    return measurements + ([] if rows is None else rows.measure_over(every, left_out, ranks, device, absent))


class _SharedResults:
    """Results of one source in all layers: every rank fills in its share, and sums over ranks give the whole.

    Shapes depend on the numbers of heads alone, so they are the same on every rank, even if one fails.
    """

    def __init__(self, source: WeightSource, layers: Sequence[AttentionLayer], device: torch.device) -> None:
        self.source = source
        self.absent: Collection[str] = ()
        self._groups: dict[Heads, list[str]] = {}
        for layer in layers:
            self._groups.setdefault(source.heads(layer), []).append(layer.name)
        self._blanks: list[dict[str, Tensor]] = []
        self._dtypes: dict[str, torch.dtype] = {}
        self._record: type = type(None)
        for heads, names in self._groups.items():
            blank = source.blank(heads)
            self._record = type(blank)
            of_blank = {item.name: getattr(blank, item.name) for item in fields(blank)}
            self._dtypes = {name: value.dtype for name, value in of_blank.items()}
            self._blanks.append(
                {
                    name: torch.zeros(len(names), *value.shape[1:], dtype=torch.float64, device=device)
                    for name, value in of_blank.items()
                }
            )

    def fill(self, measurements: Sequence[Measurement], mine: Collection[str]) -> None:
        """Enter this rank's measurements; NaN where one failed."""
        for names, blanks in zip(self._groups.values(), self._blanks):
            places = {name: place for place, name in enumerate(names)}
            lost = {places[name] for name in mine if name in places}
            for measurement in measurements:
                rows = [row for row, name in enumerate(measurement.layers) if places.get(name) in lost]
                at = [places[measurement.layers[row]] for row in rows]
                lost -= set(at)
                for field, blank in blanks.items():
                    _write(blank, at, getattr(measurement.values, field), rows)
            for field, blank in blanks.items():
                for place in lost:
                    blank[place] = torch.nan if self._dtypes[field].is_floating_point else -1

    def tensors(self) -> list[Tensor]:
        """All results, in a fixed order."""
        return [blank for blanks in self._blanks for blank in blanks.values()]

    def read(self, added: Iterator[Tensor]) -> list[Measurement]:
        """Measurements from the sums over ranks; layers that are absent here are left out."""
        measurements = []
        for names, blanks in zip(self._groups.values(), self._blanks):
            sums = {field: next(added) for field in blanks}
            rows = [row for row, name in enumerate(names) if name not in self.absent]
            if rows:
                values = {
                    field: (total if len(rows) == len(names) else torch.stack([total[row] for row in rows])).to(
                        self._kept(field)
                    )
                    for field, total in sums.items()
                }
                kept = tuple(names[row] for row in rows)
                measurements.append(Measurement(kept, self.source.name, self._record(**values)))
        return measurements

    def _kept(self, field: str) -> torch.dtype:
        kind = self._dtypes[field]
        return torch.float64 if kind.is_floating_point else kind


def _write(target: Tensor, places: Sequence[int], values: Tensor, rows: Sequence[int]) -> None:
    """Write rows of one tensor to places of another, by slices: an index list makes the host wait for the device."""
    to, of = _as_slice(places), _as_slice(rows)
    if to is not None and of is not None:
        target[to] = values[of]
        return
    for place, row in zip(places, rows):
        target[place] = values[row]


def _as_slice(places: Sequence[int]) -> slice | None:
    """Equally spaced places as a slice; `None` if they are not."""
    if not places:
        return slice(0, 0)
    step = places[1] - places[0] if len(places) > 1 else 1
    return (
        slice(places[0], places[-1] + 1, step)
        if step > 0 and list(places) == list(range(places[0], places[-1] + 1, step))
        else None
    )
