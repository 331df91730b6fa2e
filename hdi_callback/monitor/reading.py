"""One reading: tensors on the device (`Reading`), then numbers (`Record`)."""

from __future__ import annotations

import math
import time as clock
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from hdi_callback.monitor.metrics import HEADS, MATRICES, METRICS, WHOLE, WHY_NOT
from hdi_callback.record import Alert, LayerRecord, Record

Terms = dict[tuple[str, int, str], dict[str, str]]  # as of `Contract`: layer, call and fact -> name -> its state


@dataclass(frozen=True)
class Result:
    """Sums of one source for layers of one shape."""

    source: str  # one of `SOURCES`
    layers: tuple[str, ...]  # names of the layers, in the order of the first dimension of the tensors
    sums: Sequence[Tensor]  # ``(len(layers), ...)`` each, what the device has added up; sent to the host
    finish: Callable[..., Any]  # takes the sums on the host; returns what the catalogue reads


class StepFacts(NamedTuple):
    """What one step has shown: tensors on their way to the host, and what makes terms of the contract of them."""

    tensors: Sequence[Tensor]
    terms: Callable[..., Terms]


class Absent(dict[str, dict[str, str]]):
    """Layer -> source -> why it was not measured."""

    def note(self, layer: str, source: str, reason: str) -> None:
        """Note why a source of a layer was not measured; the first reason counts."""
        self.setdefault(layer, {}).setdefault(source, reason)

    @contextmanager
    def unless(self, sources: Iterable[str], layers: Iterable[str]) -> Iterator[None]:
        """Note the error of the block as the reason of sources of layers, so that the others are measured."""
        try:
            yield
        except Exception as error:
            for layer in layers:
                for source in sources:
                    self.note(layer, source, f"measuring it failed ({type(error).__name__}: {error})")


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors of layers, ``(layers, ...)``; a single one is not copied."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))


def to_host(tensor: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Return a copy on the host, and on CUDA the event after which it is whole."""
    is_cuda = tensor.device.type == "cuda"
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=is_cuda)
    host.copy_(tensor.detach(), non_blocking=is_cuda)
    event = torch.cuda.Event() if is_cuda else None
    if event is not None:
        event.record(torch.cuda.current_stream(tensor.device))
    return host, event


class Reading:
    """The measurements of one step; on CUDA their numbers are on the way to the host.

    Args:
        step: optimizer steps taken before this reading.
        layers: names of the layers that are watched, in model order.
        results: what was measured, still on the device.
        absent: layer -> source -> why it was not measured.
        alerts: returns alerts that the reading brings itself, of `further`.
        further: what else is to arrive on the host.
    """

    def __init__(
        self,
        step: int,
        layers: Sequence[str],
        results: Iterable[Result],
        absent: Mapping[str, Mapping[str, str]],
        alerts: Callable[..., tuple[Alert, ...]] = tuple,
        further: Sequence[Tensor] = (),
    ) -> None:
        self.step, self.layers, self.time = step, tuple(layers), clock.time()
        self._absent = {layer: dict(reasons) for layer, reasons in absent.items()}
        self._results, self._alerts = list(results), alerts
        self._events: list[torch.cuda.Event] = []
        self.loss: Tensor | float | None = None  # of the forward
        self.written: tuple[str, ...] = ()  # see `Record`
        # Of those on the host nothing writes what was computed for this reading, so they stay as they are.
        self._sums = [*(tensor for result in self._results for tensor in result.sums), *further]
        self._packs = self._pack()

    def __repr__(self) -> str:
        return f"<Reading at step {self.step}: {len(self.layers)} layers; its numbers: record()>"

    def _pack(self) -> list[tuple[Sequence[int], Tensor, Sequence[Tensor]]]:
        """Return places of tensors on devices, copies on the host, as one for each device and type, and themselves."""
        groups: dict[Any, list[int]] = {}
        for place, tensor in enumerate(self._sums):
            if not (tensor.is_cpu or tensor.is_meta):
                groups.setdefault((tensor.device, tensor.dtype), []).append(place)
        parts = [[self._sums[place] for place in places] for places in groups.values()]
        return [*zip(groups.values(), [self._copied(_flatten_dense_tensors(each)) for each in parts], parts)]

    def _copied(self, tensor: Tensor) -> Tensor:
        """Return a copy on the host, which is whole once the events have happened."""
        host, event = to_host(tensor)
        self._events += [] if event is None else [event]
        return host

    def keep_loss(self, loss: Tensor | float) -> None:
        """Keep the loss of the forward, without waiting for the device."""
        self.loss = self._copied(loss) if isinstance(loss, Tensor) else loss

    def is_ready(self) -> bool:
        """Return whether `record` would not wait for the device."""
        return all(event.query() for event in self._events)

    def record(self) -> Record:
        """Turn the reading into numbers, waiting for the copy if it is under way.

        Returns:
            One `LayerRecord` for each layer, with a reason for everything that was not measured.
        """
        for event in self._events:
            event.synchronize()
        absent = Absent({name: dict(self._absent.get(name, {})) for name in self.layers})
        layers = {name: LayerRecord(absent=absent[name]) for name in self.layers}
        tensors = dict(enumerate(self._sums))
        for places, *pack in self._packs:
            tensors |= zip(places, _unflatten_dense_tensors(*pack))
        arrived = iter(tensors.values())
        for result in self._results:
            columns: list[_Column] = []
            sums = list(islice(arrived, len(result.sums)))
            if not any(tensor.is_meta for tensor in sums):
                with absent.unless([result.source], result.layers):
                    columns = _read(result.source, result.finish(*sums))
            _enter([layers[name] for name in result.layers], result.source, columns)
        loss = None if self.loss is None else float(self.loss)
        alerts = self._alerts(*arrived)
        return Record(self.step, layers, time=self.time, loss=loss, written=self.written, alerts=alerts)


_Column = tuple[str, str, Any]  # "values", "heads" or "matrices"; the name; the numbers of all layers of a result


def _enter(layers: Sequence[LayerRecord], source: str, columns: Sequence[_Column]) -> None:
    """Enter the numbers of one source of layers; where none of its metrics is known, the reason alone."""
    kinds = ("values", "heads", "matrices")
    values, heads, matrices = ([(name, each) for kind, name, each in columns if kind == wanted] for wanted in kinds)
    for row, layer in enumerate(layers):
        finite = {name: numbers[row] for name, numbers in values if math.isfinite(numbers[row])}
        if not finite:
            layer.absent.setdefault(source, WHY_NOT[source])
            continue
        layer.absent.pop(source, None)  # other ranks have measured it
        layer.values.update(finite)
        if len(finite) < len(values):
            layer.absent.update({name: WHY_NOT[source] for name, _ in values if name not in finite})
        layer.heads.update({name: numbers[row] for name, numbers in heads})
        layer.matrices.update({name: numbers[row] for name, numbers in matrices})


def _read(source: str, measured: Any) -> list[_Column]:
    """Return all entries of the catalogue that are read from one source; but for matrices, lists of plain numbers."""
    columns: list[_Column] = []
    for kind, table in (("values", METRICS), ("heads", HEADS), ("matrices", MATRICES)):
        for name, entry in table.items():
            if entry.source == source:
                tensor = entry.read(measured)
                is_matrix = kind == "matrices"
                numbers = tensor.to(torch.float32, copy=True) if is_matrix else tensor.to(torch.float64).tolist()
                if kind == "heads" and (name in WHOLE or name.endswith("_pair")):
                    numbers = [[int(x) if math.isfinite(x) else x for x in of_layer] for of_layer in numbers]
                columns.append((kind, name, numbers))
    return columns
