"""One reading: tensors on the device (`Reading`), then numbers (`Record`)."""

from __future__ import annotations

import math
import os
import time as clock
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from threading import RLock
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from hdi_callback.guard import without_modes
from hdi_callback.monitor.metrics import FORWARD_SOURCES, HEADS, MATRICES, METRICS, WEIGHT_SOURCES, WHOLE, WHY_NOT
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


Later = Callable[[Absent], list[Result]]
"""What measures copies, so that the training may go on before: it returns results, and notes what has none."""


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


class OnTheWay:
    """Tensors that are sent to the host; on CUDA nothing waits for them until they are asked for."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        # Of those on the host nothing writes what was computed for this reading, so they stay as they are.
        self._tensors = dict(enumerate(tensors))
        groups: dict[Any, list[int]] = {}
        for place, tensor in self._tensors.items():
            if not (tensor.is_cpu or tensor.is_meta):
                groups.setdefault((tensor.device, tensor.dtype), []).append(place)
        # Places of tensors, themselves, and a copy of them as one for each device and type.
        parts = [(places, [self._tensors[place] for place in places]) for places in groups.values()]
        self._packs = [(places, part, to_host(_flatten_dense_tensors(part))) for places, part in parts]

    def arrived(self) -> Iterator[Tensor]:
        """Wait for the copies that are under way, and return all tensors on the host."""
        tensors = dict(self._tensors)
        for places, part, (host, event) in self._packs:
            if event is not None:
                event.synchronize()
            tensors |= zip(places, _unflatten_dense_tensors(host, part))
        return iter(tensors.values())


class Reading:
    """The measurements of one step; on CUDA their numbers are on the way to the host.

    Args:
        step: optimizer steps taken before this reading.
        layers: names of the layers that are watched, in model order.
        results: what was measured, still on the device.
        absent: layer -> source -> why it was not measured.
        alerts: returns alerts that the reading brings itself, of `further`.
        further: what else is to arrive on the host.
        later: what measures the rest.
    """

    def __init__(
        self,
        step: int,
        layers: Sequence[str],
        results: Iterable[Result],
        absent: Mapping[str, Mapping[str, str]],
        alerts: Callable[..., tuple[Alert, ...]] = tuple,
        further: Sequence[Tensor] = (),
        later: Sequence[Later] = (),
    ) -> None:
        self.step, self.layers, self.time = step, tuple(layers), clock.time()
        self._absent = Absent({name: dict(absent.get(name, {})) for name in self.layers})
        self._alerts, self._further = alerts, OnTheWay(further)
        self._results = [self._sent(results)]  # in parts, each with its sums
        self._later, self._lock = later, RLock()
        self._loss: OnTheWay | float | None = None
        self.written: tuple[str, ...] = ()  # see `Record`
        if later:
            _UNDER_WAY[id(self)] = self

    def __repr__(self) -> str:
        return f"<Reading at step {self.step}: {len(self.layers)} layers; its numbers: record()>"

    @staticmethod
    def _sent(results: Iterable[Result]) -> tuple[list[Result], OnTheWay]:
        listed = list(results)
        return listed, OnTheWay(tensor for result in listed for tensor in result.sums)

    def complete(self) -> None:
        """Measure the rest, once, in any thread: neither the model nor its weights are looked at."""
        with self._lock, without_modes():
            if self._later:
                with self._absent.unless((*WEIGHT_SOURCES, *FORWARD_SOURCES), self.layers):
                    self._results.insert(0, self._sent(result for each in self._later for result in each(self._absent)))
                self._later = ()

    def keep_loss(self, loss: Tensor | float) -> None:
        """Keep the loss of the forward, the first one, without waiting for the device."""
        if self._loss is None:
            self._loss = OnTheWay([loss.detach().clone()]) if isinstance(loss, Tensor) else loss

    def record(self) -> Record:
        """Turn the reading into numbers, once the rest is measured and the copies have arrived.

        Returns:
            One `LayerRecord` for each layer, with a reason for everything that was not measured.
        """
        self.complete()
        absent = Absent({name: dict(self._absent.get(name, {})) for name in self.layers})
        layers = {name: LayerRecord(absent=absent[name]) for name in self.layers}
        for results, on_the_way in self._results:
            arrived = on_the_way.arrived()
            for result in results:
                columns: list[_Column] = []
                sums = list(islice(arrived, len(result.sums)))
                if not any(tensor.is_meta for tensor in sums):
                    with absent.unless([result.source], result.layers):
                        columns = _read(result.source, result.finish(*sums))
                _enter([layers[name] for name in result.layers], result.source, columns)
        loss = float(next(self._loss.arrived())) if isinstance(self._loss, OnTheWay) else self._loss
        alerts = self._alerts(*self._further.arrived())
        return Record(self.step, layers, time=self.time, loss=loss, written=self.written, alerts=alerts)


_UNDER_WAY = WeakValueDictionary[int, Reading]()


def complete_all() -> None:
    """Measure the rest of all readings that somebody waits for."""
    for reference in _UNDER_WAY.valuerefs():
        reading = reference()
        if reading is not None:
            reading.complete()


# A process that forks while a thread is in a product leaves the locks of its library to the child, for ever.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=complete_all, after_in_child=_UNDER_WAY.clear)

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
