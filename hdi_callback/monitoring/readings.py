"""The measurements of one step: tensors on the device (`Reading`), then numbers (`Record`)."""

from __future__ import annotations

import math
import time as clock
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from hdi_callback.attention import ROLES
from hdi_callback.core import HeadCovariance
from hdi_callback.guard import guarded
from hdi_callback.monitoring.metrics import COVARIANCE, DEFAULT_METRICS, DETAILS, METRICS
from hdi_callback.monitoring.plain_table import plain_table
from hdi_callback.monitoring.warn_once import WarnOnce

READING_OUT = "reading out head diversity"
NOT_FINITE = "the weights are not finite"
"""Reason why a layer whose weights hold NaN or infinity has no index."""


@dataclass(frozen=True)
class Measurement:
    """One batched result over layers of one shape.

    Attributes:
        layers: names of the layers, in the order of the batch dimension.
        source: a role (``"key"``, ...) or another source such as ``"head outputs"``.
        values: a frozen record of tensors of shape ``(len(layers), ...)``.
    """

    layers: tuple[str, ...]
    source: str
    values: Any


@dataclass(frozen=True, repr=False)
class Reading:
    """The measurements of one step, as tensors on the device.

    Attributes:
        step: optimizer steps taken before this reading.
        layers: names of the layers that were read, in model order.
        measurements: batched results, one per source and shape.
        absent: quantities that could not be measured: layer, or source and layer -> reason.
        epoch: epoch of the reading, if the trainer has epochs.
        axis: position on the trainer's own logging axis; `step` if there is none.
        time: seconds since the Unix epoch.
        frozen: names of the layers none of whose parameters required a gradient; `None` if that is not known.
        warn_once: warns once if `record` fails; that of the monitor.
    """

    step: int
    layers: tuple[str, ...]
    measurements: tuple[Measurement, ...]
    absent: Mapping[str, str] = field(default_factory=dict)
    epoch: int | None = None
    axis: int | None = None
    time: float = field(default_factory=clock.time)
    frozen: frozenset[str] | None = field(default=None, compare=False)
    warn_once: WarnOnce = field(default_factory=WarnOnce, compare=False, repr=False)

    def __repr__(self) -> str:
        return f"<Reading at step {self.step}: {len(self.layers)} layers; its numbers: record()>"

    @guarded(READING_OUT, otherwise=lambda self: self.without_numbers())
    def record(self) -> Record:
        """Turn the reading into numbers; waits for the device.

        Returns:
            The same reading as plain numbers. If that fails there is one warning, and no number but the reason, in
            `Record.absent`.
        """
        return Readout(self).record()

    def without_numbers(self) -> Record:
        """The record of a reading whose numbers could not be read out.

        Returns:
            No numbers, and the reason for every layer.
        """
        absent = {**dict.fromkeys(self.layers, f"{READING_OUT} failed"), **self.absent}
        layers = {name: LayerRecord() for name in self.layers}
        axis = self.step if self.axis is None else self.axis
        return Record(self.step, layers, absent, self.epoch, axis, self.time, self.frozen)

    def _failed(self, work: str, error: Exception) -> None:
        self.warn_once.error(work, error)


@dataclass(frozen=True, repr=False)
class LayerRecord:
    """The numbers of one layer at one step.

    Attributes:
        values: metric name -> number; quantities that could not be measured are missing.
        arrays: pairs of heads: ``worst_pair``, ``worst_alignment_pair``, ``energy_worst_pair`` and
            ``energy_worst_alignment_pair``; one entry per head: ``nearest``, ``nearest_overlap``, ``rank``,
            ``effective_rank``, ``flatness`` and ``head_norm``; with the role in front for roles other than key; and the
            arrays of `DETAILS`.
        matrices: ``overlap``, ``energy_overlap``, ``pair_alignment``, ``energy_pair_alignment``, ``output_overlap`` and
            the matrices of `DETAILS`, ``(H, H)``, on the host.
    """

    values: dict[str, float] = field(default_factory=dict)
    arrays: dict[str, list[Any]] = field(default_factory=dict)
    matrices: dict[str, Tensor] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<LayerRecord: {len(self.values)} values, {len(self.arrays)} arrays, {len(self.matrices)} matrices>"


@dataclass(frozen=True, repr=False)
class Record:
    """One reading as plain numbers.

    Attributes:
        step: optimizer steps taken before this reading.
        layers: layer name -> its numbers, in model order; no numbers where nothing could be measured.
        absent: quantities that could not be measured: layer or tag -> reason.
        epoch: epoch of the reading, if the trainer has epochs.
        axis: position on the trainer's own logging axis.
        time: seconds since the Unix epoch.
        frozen: names of the layers none of whose parameters required a gradient; `None` where that is not known.
    """

    step: int
    layers: dict[str, LayerRecord]
    absent: dict[str, str] = field(default_factory=dict)
    epoch: int | None = None
    axis: int = 0
    time: float = 0.0
    frozen: frozenset[str] | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"<Record at step {self.step}: {len(self.layers)} layers>"

    def __str__(self) -> str:
        """A table of the layers with the metrics that are logged by default."""
        rows = [
            (name, *(f"{layer.values[metric]:.3g}" if metric in layer.values else "-" for metric in DEFAULT_METRICS))
            for name, layer in self.layers.items()
        ]
        return f"step {self.step}\n{plain_table(('layer', *DEFAULT_METRICS), rows)}"

    def scalars(self, metrics: tuple[str, ...] | list[str]) -> dict[str, float]:
        """The values that go to the loggers.

        Args:
            metrics: names of metrics.

        Returns:
            Tag -> number: first over all layers, ``hdi/mean`` and ``hdi/min`` when ``"hdi"`` is among the metrics, and
            ``<metric>/max`` or ``<metric>/min`` for metrics of which one extreme is the worse one; then
            ``<metric>/<layer>`` for every layer that has it.
        """
        over_layers = self.summary() if "hdi" in metrics else {}
        for tag, name in self.worst(metrics).items():
            over_layers[tag] = self.layers[name].values[tag.partition("/")[0]]
        by_layer = {
            f"{metric}/{name}": layer.values[metric]
            for metric in metrics
            for name, layer in self.layers.items()
            if metric in layer.values
        }
        return {**over_layers, **by_layer, **over_layers}

    def worst(self, metrics: tuple[str, ...] | list[str]) -> dict[str, str]:
        """The layers whose values are logged as those of the worst layer.

        Args:
            metrics: names of metrics.

        Returns:
            Tag over all layers, ``<metric>/max`` or ``<metric>/min`` -> name of the layer; the first one of several.
        """
        found = {}
        for metric in metrics:
            known = {name: layer.values[metric] for name, layer in self.layers.items() if metric in layer.values}
            end = METRICS[metric].worst if metric in METRICS else None
            if known and end is not None:
                found[f"{metric}/{end}"] = (max if end == "max" else min)(known, key=lambda name: known[name])
        return found

    def summary(self) -> dict[str, float]:
        """Mean and minimum of the index over the layers.

        Returns:
            ``hdi/mean`` and ``hdi/min``; empty if no layer has an index.
        """
        index = [layer.values["hdi"] for layer in self.layers.values() if "hdi" in layer.values]
        return {"hdi/mean": math.fsum(index) / len(index), "hdi/min": min(index)} if index else {}


class Readout:
    """Copy a reading to the host without making the host wait for the device.

    On CUDA the numbers of the whole reading travel in one asynchronous copy into pinned memory; `is_ready` asks an
    event. Elsewhere the copy is made at once.

    Args:
        reading: the reading; its tensors are kept alive until the copy is done.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading = _without_meta(reading)
        self._hosts: dict[torch.device, Tensor] = {}
        self._events: list[torch.cuda.Event] = []
        flat: dict[torch.device, list[Tensor]] = {}
        for tensor in _tensors(reading):
            # Small integers (heads, ranks) are exact in either width; MPS has no float64.
            wide = torch.float32 if tensor.device.type == "mps" else torch.float64
            flat.setdefault(tensor.device, []).append(tensor.detach().reshape(-1).to(wide))
        self._devices = {device: torch.cat(parts) for device, parts in flat.items()}
        for device, joined in self._devices.items():
            if device.type == "cuda":
                host = torch.empty(joined.shape, dtype=joined.dtype, device="cpu", pin_memory=True)
                host.copy_(joined, non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(device))
                self._events.append(event)
                self._hosts[device] = host
            else:
                self._hosts[device] = joined.cpu()

    @property
    def step(self) -> int:
        """Step of the reading."""
        return self._reading.step

    def without_numbers(self) -> Record:
        """The record if `record` fails.

        Returns:
            See `Reading.without_numbers`.
        """
        return self._reading.without_numbers()

    def is_ready(self) -> bool:
        """Return whether the numbers have arrived, without waiting.

        Returns:
            True once `record` would not wait.
        """
        return all(event.query() for event in self._events)  # type: ignore[no-untyped-call]

    def record(self) -> Record:
        """Turn the reading into numbers, waiting for the copy if it is under way.

        Returns:
            The reading as plain numbers.
        """
        for event in self._events:
            event.synchronize()
        offsets = dict.fromkeys(self._hosts, 0)

        def arrived(tensor: Tensor) -> Tensor:
            start = offsets[tensor.device]
            offsets[tensor.device] = start + tensor.numel()
            return self._hosts[tensor.device][start : start + tensor.numel()].reshape(tensor.shape).to(tensor.dtype)

        measurements = []
        for measurement in self._reading.measurements:
            values: Any = measurement.values
            on_host = replace(values, **{name: arrived(value) for name, value in _fields(values).items()})
            measurements.append(replace(measurement, values=on_host))
        return _tabulate(replace(self._reading, measurements=tuple(measurements)))


AMBIGUOUS_MASK = "a mask can be read in two ways, so that padding is not known: write padding=..."


def _without_meta(reading: Reading) -> Reading:
    """Leave out results of weights on the meta device, which hold no numbers."""
    without = [
        measurement
        for measurement in reading.measurements
        if any(value.is_meta for value in _fields(measurement.values).values())
    ]
    if not without:
        return reading
    kept = tuple(
        measurement for measurement in reading.measurements if not any(measurement is other for other in without)
    )
    reason = "its weights are on the meta device, which holds no numbers"
    names = {name if one.source in ROLES else f"{one.source}/{name}": reason for one in without for name in one.layers}
    return replace(reading, measurements=kept, absent={**names, **reading.absent})


def _why_no_covariance(tokens: float) -> str:
    if math.isnan(tokens):
        return AMBIGUOUS_MASK
    return f"there were {tokens:.0f} tokens without padding, and two are needed"


def _fields(values: Any) -> dict[str, Any]:
    return {item.name: getattr(values, item.name) for item in fields(values)}


def _tensors(reading: Reading) -> list[Tensor]:
    return [value for measurement in reading.measurements for value in _fields(measurement.values).values()]


_PAIRS = ("worst_pair", "worst_alignment_pair", "energy_worst_pair", "energy_worst_alignment_pair")
_ARRAYS = (*_PAIRS, "nearest", "nearest_overlap", "rank", "effective_rank", "flatness", "head_norm")
_MATRICES = ("overlap", "energy_overlap", "pair_alignment", "energy_pair_alignment", "output_overlap")


def _tabulate(reading: Reading) -> Record:
    """Sort a reading whose tensors are on the host into one record per layer."""
    layers = {name: LayerRecord() for name in reading.layers}
    absent = dict(reading.absent)
    for measurement in reading.measurements:
        columns = {
            metric.name: metric.read(measurement.values).double().tolist()
            for metric in METRICS.values()
            if metric.source == measurement.source
        }
        prefix = "" if measurement.source in ("key", COVARIANCE) else f"{measurement.source}_"
        arrays = {name: getattr(measurement.values, name, None) for name in _ARRAYS}
        matrices = {name: getattr(measurement.values, name, None) for name in _MATRICES}
        details = DETAILS.get(measurement.source)
        for row, name in enumerate(measurement.layers):
            layer = layers[name]
            is_known = any(math.isfinite(column[row]) for column in columns.values())
            is_stated = f"{measurement.source}/{name}" in absent  # the reason on this rank, at least
            for metric, column in columns.items():
                if math.isfinite(column[row]):
                    layer.values[metric] = column[row]
                elif details is not None and (is_known or not is_stated):
                    absent[f"{metric}/{name}"] = details.why_not
            if details is not None:
                if is_known:
                    absent.pop(f"{measurement.source}/{name}", None)  # other ranks have measured it
                of = {key: getattr(measurement.values, field)[row] for key, field in details.arrays.items()}
                layer.arrays.update({key: array.tolist() for key, array in of.items()})
                layer.matrices.update(
                    {key: getattr(measurement.values, field)[row] for key, field in details.matrices.items()}
                )
                continue
            layer.arrays.update(
                {prefix + key: array[row].tolist() for key, array in arrays.items() if array is not None}
            )
            layer.matrices.update({prefix + key: matrix[row] for key, matrix in matrices.items() if matrix is not None})
            index = "hdi" if measurement.source == "key" else f"hdi_{measurement.source}"
            if index in columns and index not in layer.values:
                finite = math.isfinite(columns[f"{index}_effective_heads"][row])
                absent[f"{index}/{name}"] = "fewer than two live heads" if finite else NOT_FINITE
            if isinstance(measurement.values, HeadCovariance):
                tokens = float(measurement.values.tokens[row])
                if not tokens:
                    absent.setdefault(f"{COVARIANCE}/{name}", _why_no_covariance(tokens))
                elif not tokens >= 2:
                    absent[f"{COVARIANCE}/{name}"] = _why_no_covariance(tokens)
                else:
                    absent.pop(f"{COVARIANCE}/{name}", None)  # other ranks have measured it
    axis = reading.step if reading.axis is None else reading.axis
    return Record(reading.step, layers, absent, reading.epoch, axis, reading.time, reading.frozen)
