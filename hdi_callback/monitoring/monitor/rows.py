"""Attention rows of the armed forward: observed, and measured by one process or over ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.attention import AttentionLayer
from hdi_callback.attention.calls import running_calls
from hdi_callback.attention.capture.padding import PaddingChoice, find_padding, fit_padding
from hdi_callback.attention.observe import AttentionObserver, ObservedCore, RowChunk, are_pieces
from hdi_callback.core import AttentionSums, NormSums, logit_bound
from hdi_callback.guard import attempt_each
from hdi_callback.monitoring.absent import Absent, absence_of
from hdi_callback.monitoring.layers import HeadVerifier, WatchedLayers
from hdi_callback.monitoring.metrics import ROWS
from hdi_callback.monitoring.monitor.join import join
from hdi_callback.monitoring.monitor.rotation import LayerRotation
from hdi_callback.monitoring.ranks import Ranks
from hdi_callback.monitoring.readings import Measurement


class _OtherHeads(str):
    """Why rows are not known: attention ran with another number of heads than the layer has."""

    __slots__ = ()


@dataclass(frozen=True)
class HeadAttention:
    """Attention statistics of a layer's heads: the fields of `AttentionRows`, and the following.

    Attributes:
        logit_bound: ``(H,)``, upper bound of the scores of all queries; NaN where scores are not products of queries
            and keys plus known terms.
        query_norm: ``(H,)``, mean norm of the queries as they enter the product.
        key_norm: ``(H,)``, mean norm of the keys that a head sees.
        key_norm_spread: ``(H,)``, coefficient of variation of these norms.
    """

    entropy: Tensor
    samples: Tensor
    sink: Tensor
    sink_position: Tensor
    overlap: Tensor
    overlap_mean: Tensor
    alike: Tensor
    alike_mean: Tensor
    alike_worst: Tensor
    alike_worst_pair: Tensor
    logit: Tensor
    keys: Tensor
    ahead: Tensor
    logit_bound: Tensor
    query_norm: Tensor
    key_norm: Tensor
    key_norm_spread: Tensor


@dataclass(frozen=True)
class RowSums:
    """Sums over a rank's queries and tokens of one layer.

    Attributes:
        rows: sums over the sampled queries.
        query: norms of all queries, for each of H heads.
        key: norms of all keys, for each of H heads.
        scale: size of the factor of the scores.
        bias: largest additive term of a score.
        unbounded: 1 where the scores are not bounded by norms, 0 elsewhere.
    """

    rows: AttentionSums
    query: NormSums
    key: NormSums
    scale: Tensor
    bias: Tensor
    unbounded: Tensor

    @classmethod
    def none(cls, heads: int, device: torch.device) -> RowSums:
        """Sums over no queries.

        Args:
            heads: H.
            device: the device of the sums.

        Returns:
            Zeros.
        """
        nothing = torch.zeros(1, heads, 0, 0, device=device)
        norms = NormSums.of(torch.zeros(heads, 0, 1, device=device))
        zero = torch.zeros((), device=device)
        return cls(AttentionSums.of(nothing), norms, norms, zero, zero - torch.inf, zero)

    def added(self) -> list[Tensor]:
        """The tensors that add up over ranks, in a fixed order."""
        return [getattr(part, name) for part in (self.rows, self.query, self.key) for name in _added(part)]

    def largest(self) -> list[Tensor]:
        """The tensors that merge by maximum over ranks, in a fixed order."""
        return [self.rows.logit, self.query.largest, self.key.largest, self.scale, self.bias, self.unbounded]

    def over_ranks(self, added: Sequence[Tensor], largest: Sequence[Tensor]) -> RowSums:
        """The sums over all ranks.

        Args:
            added: `added`, summed over ranks.
            largest: `largest`, maximum over ranks.

        Returns:
            The sums.
        """
        rest = iter(added)
        parts: list[Any] = []
        for part, top in zip((self.rows, self.query, self.key), largest):
            values = {name: next(rest) for name in _added(part)}
            name = "logit" if isinstance(part, AttentionSums) else "largest"
            parts.append(type(part)(**values, **{name: top}))
        rows, query, key = parts
        return RowSums(rows, query, key, *largest[3:])

    @staticmethod
    def together(parts: Sequence[RowSums]) -> RowSums:
        """Add sums over different queries.

        Args:
            parts: at least one, on one device.

        Returns:
            The sums over all.
        """
        width = max(part.rows.columns.shape[-1] for part in parts)
        parts = [replace(part, rows=part.rows.padded(width)) for part in parts]
        added = [torch.stack(tensors).sum(0) for tensors in zip(*(part.added() for part in parts))]
        largest = [torch.stack(tensors).amax(0) for tensors in zip(*(part.largest() for part in parts))]
        return parts[0].over_ranks(added, largest)

    def averages(self) -> HeadAttention:
        """Divide by the numbers of queries and tokens.

        Returns:
            The averages.
        """
        rows = self.rows.rows()
        bound = logit_bound(self.query, self.key, self.scale, bias=torch.where(self.bias.isfinite(), self.bias, 0))
        bound = torch.where(self.unbounded > 0, torch.nan, bound)
        of_rows = {item.name: getattr(rows, item.name) for item in fields(HeadAttention) if hasattr(rows, item.name)}
        return HeadAttention(
            **of_rows,
            logit_bound=bound,
            query_norm=self.query.mean,
            key_norm=self.key.mean,
            key_norm_spread=self.key.spread,
        )


class AttentionReadings:
    """Observe attention in the armed forward, to verify heads, and measure its rows.

    Args:
        layers: the layers that are watched.
        verifier: verifies their heads by the same forward.
        model: the model that is called.
        padding: how padding is known.
        rotation: which layers a reading skips.
        reads_rows: measure attention rows; else attention is observed to verify heads alone.
        max_queries: number of queries of each layer that are read.

    Attributes:
        observer: observes the armed forward.
    """

    def __init__(
        self,
        layers: WatchedLayers,
        verifier: HeadVerifier,
        model: nn.Module,
        *,
        padding: PaddingChoice,
        rotation: LayerRotation,
        reads_rows: bool = True,
        max_queries: int = 64,
    ) -> None:
        self._layers, self._verifier, self._model = layers, verifier, model
        self._choice, self._rotation, self._reads_rows = padding, rotation, reads_rows
        self.observer = AttentionObserver(
            model,
            layers.all,
            max_queries=max_queries,
            reduce_rows=_reduce if reads_rows else None,
            reduce_norms=NormSums.of if reads_rows else None,
            padding=self._padding,
        )
        self._padding_mask: Tensor | None = None
        self._is_armed = self._training_only = self._is_suspended = False
        self._sums: dict[str, RowSums] | None = None
        self._agreed: set[str] = set()  # names of layers whose attention had the heads that are claimed

    def arm(self, *, training_only: bool, padding_mask: Tensor | None) -> None:
        """Observe the forwards that follow; see `HeadDiversityMonitor.arm`.

        Args:
            training_only: skip forwards that autograd does not record.
            padding_mask: ``(batch, length)``, true where a token is padding.
        """
        self._is_armed, self._training_only, self._padding_mask = True, training_only, padding_mask
        if not self._is_suspended:
            self._observe()

    def _observe(self) -> None:
        is_verifying = self._verifier.is_verifying
        if self._reads_rows or is_verifying:
            self.observer.layers = self._layers.all
            waiting = self._rotation.skipped(ROWS)
            self.observer.arm(
                keeps_samples=is_verifying, without_rows=[one for one in self._layers.all if one.name in waiting]
            )

    @property
    def has_run(self) -> bool:
        """Whether a forward was observed since `arm`."""
        return self.observer.has_run

    def disarm(self) -> None:
        """Stop observing; keep the observations."""
        self.observer.disarm()

    def release(self) -> None:
        """Stop observing; discard the observations."""
        self.observer.release()
        self._is_armed, self._padding_mask = False, None

    def skip_forward(self) -> None:
        """Do nothing: an observer leaves nothing in a graph."""

    def remove(self) -> None:
        """Remove all hooks from the model, and discard the observations."""
        attempt_each([self.release, self.suspend])

    def suspend(self) -> None:
        """Remove all hooks from the model."""
        self._is_suspended = True
        self.observer.suspend()

    def resume(self) -> None:
        """Put the hooks back after `suspend`."""
        self._is_suspended = False
        self.observer.resume()
        if self._is_armed:
            self._observe()

    def collect(self, names: Collection[str], pending: Collection[str], absent: Absent) -> None:
        """Collect the observations for the next measurement.

        Args:
            names: of the layers that are asked for.
            pending: names of those whose forward may still come.
            absent: notes what was not observed.
        """
        self.observer.disarm()
        self._sums = None
        if self._is_armed and self._reads_rows:
            self._sums = {}
            modules = {name: id(module) for name, module in self._model.named_modules()}
            paths = {identity: name for name, identity in modules.items()}
            watched = {id(layer.module) for layer in self._layers.all}
            places = {name: identity for name, identity in modules.items() if identity in watched}
            waiting = self._rotation.skipped(ROWS)
            for layer in self._layers.all:
                if layer.name in self._layers.removed or self._layers.is_contradicted(layer.name):
                    continue
                if layer.name in pending or layer.name not in names or layer.name in waiting:
                    continue
                path = paths.get(id(layer.module), layer.name)
                found = self._sums_of(layer, path, places)
                if isinstance(found, RowSums):
                    self._agreed.add(layer.name)
                elif layer.name in self._agreed and isinstance(found, _OtherHeads):
                    self._layers.leave_out_later(layer.name, f"since then {found}")
                    continue
                if isinstance(found, str):
                    absent.leave_out(absence_of(ROWS, layer.name), f"they are not known: {found}", f"{ROWS} {found}")
                else:
                    self._sums[layer.name] = found
        self.release()

    @property
    def has_collected(self) -> bool:
        """Whether a forward was armed for the next measurement."""
        return self._sums is not None

    def join_measurement(self) -> None:
        """Take part in the measurement of other ranks' observations without one of this rank's own."""
        self._sums = {} if self._sums is None and self._reads_rows else self._sums

    def clear(self) -> None:
        """Discard the observations after the measurement."""
        self._sums = None

    def measure(self, absent: Absent) -> list[Measurement]:
        """Measure the observations of one process.

        Args:
            absent: notes what cannot be measured.

        Returns:
            One measurement for each number of heads.
        """
        return self._measure({} if self._sums is None else self._sums, absent)

    def measure_over(
        self,
        layers: Sequence[AttentionLayer],
        left_out: Collection[str],
        ranks: Ranks,
        device: torch.device,
        absent: Absent,
    ) -> list[Measurement]:
        """Measure the observations of all ranks.

        Args:
            layers: those of all ranks, the same on every rank.
            left_out: names of those whose heads are contradicted.
            ranks: those that measure together; all of them call this.
            device: where they add up.
            absent: notes what cannot be measured.

        Returns:
            One measurement for each number of heads; none if no forward was armed, which is the same on all ranks.
        """
        if self._sums is None:
            return []
        sums = [self._sums.get(layer.name, RowSums.none(layer.num_heads, device)) for layer in layers]
        # Sequence lengths may differ between ranks; the shapes of sums must not.
        widths = [torch.tensor(float(one.rows.columns.shape[-1]), device=device) for one in sums]
        # The widths and the largest scores are exchanged at once, as each call waits for all ranks.
        tops = [tensor for one in sums for tensor in one.largest()]
        widths, largest = _split(ranks.largest([*widths, *tops], device), len(widths))
        keys = [int(width) for width in widths]
        sums = [replace(one, rows=one.rows.padded(width)) for one, width in zip(sums, keys)]
        added = ranks.sum([tensor for one in sums for tensor in one.added()], device)
        totals = {}
        for layer, one, width in zip(layers, sums, keys):
            of_sum, added = added[: len(one.added())], added[len(one.added()) :]
            of_largest, largest = largest[: len(one.largest())], largest[len(one.largest()) :]
            # A layer that no rank observed is not reported: its reason is known already.
            if width and layer.name not in left_out:
                totals[layer.name] = one.over_ranks(of_sum, of_largest)
        return self._measure(totals, absent)

    def _measure(self, sums: dict[str, RowSums], absent: Absent) -> list[Measurement]:
        measured: dict[tuple[int, torch.device], list[tuple[str, HeadAttention]]] = {}
        for name, one in sums.items():
            with absent.unless_measured(ROWS, name):
                values = one.averages()
                measured.setdefault((len(values.entropy), values.entropy.device), []).append((name, values))
        return [join(ROWS, group) for group in measured.values()]

    def _sums_of(self, layer: AttentionLayer, path: str, places: Mapping[str, int]) -> RowSums | str:
        """The sums of a layer's attention, or why there are none; `places`: name of a watched module -> its id."""
        closed = [why for name, why in self.observer.closed.items() if name in ("", path) or _is_in(path, name)]
        if closed:
            return closed[0]
        skipped = [why for name, why in self.observer.skipped.items() if name in ("", path) or _is_in(path, name)]
        if not self.observer.has_run:
            return self.observer.reason or next(iter(skipped), "no forward of the model ran")
        others = {id(one.module) for one in self._layers.all if one.name != layer.name}
        inner = {name for name, identity in places.items() if identity in others and _is_in(name, path)}
        cores = [core for core in self.observer.cores if path in core.parts and not inner & set(core.parts)]
        if not cores:
            failed = [f"observing its forward failed ({why.partition(': ')[2]})" for why in self.observer.failures[:1]]
            return next(iter((*skipped, *failed)), "no attention was observed in its module")
        trains = [core for core in cores if core.is_recorded]
        reads_all = not self._training_only and not any(core.is_recorded for core in self.observer.cores)
        if not trains and not reads_all:
            return "it ran only without autograd, and only training forwards are captured"
        cores = trains or cores
        read = [core for core in cores if core.rows is not None]
        if not read:
            return next((core.unread for core in cores if core.unread), "its attention was not read")
        if len(read) > 1 and (len(read) < len(cores) or not are_pieces(read)):
            return f"its module computes attention in {len(read)} places"
        sums: list[RowSums] = []
        for core in read:
            of_core = _sums(core, layer)
            if isinstance(of_core, str):
                return of_core
            sums.append(of_core)
        return sums[0] if len(sums) == 1 else RowSums.together(sums)

    def _padding(self, sequences: int, length: int) -> Tensor | None:
        """Mask of the padding tokens of the running attention; `None` if the masks that it receives decide."""
        shape = (sequences, length)
        if self._padding_mask is not None:
            padding = fit_padding(self._padding_mask.bool(), shape)
        elif self._choice is None:
            return torch.zeros(shape, dtype=torch.bool, device="cpu")
        else:
            padding = find_padding(shape, running_calls(), choice=self._choice).padded
        return None if padding is None or padding.dtype != torch.bool else padding.view(shape)


def _reduce(chunk: RowChunk) -> AttentionSums:
    # With more keys than queries, as behind a cache, or fewer, their order is not known.
    placed = chunk.positions if chunk.queries == chunk.weights.shape[-1] else None
    return AttentionSums.of(chunk.weights, chunk.visible, logits=chunk.logits, positions=placed)


def _sums(core: ObservedCore, layer: AttentionLayer) -> RowSums | str:
    rows: AttentionSums = core.rows
    H = len(rows.entropy)
    if layer.num_heads != H:
        return _OtherHeads(f"its attention has {H} heads, and {layer.num_heads} were found in its weights")
    order = core.head_order or layer.head_order
    rows = rows.of_heads(order) if order else rows
    device = rows.entropy.device
    query, key = (_by_query_head(core.norms.get(role), H, device, order) for role in ("query", "key"))
    number = partial(torch.tensor, device=device, dtype=torch.float32)
    is_bounded = core.is_bounded and core.scale is not None and {"query", "key"} <= set(core.norms)
    # A number from the host makes no device wait.
    scale = core.scale.abs().float() if isinstance(core.scale, Tensor) else number(abs(core.scale or 0.0))
    bias = number(-torch.inf) if core.bias is None else core.bias.float().to(device)
    return RowSums(rows, query, key, scale, bias, number(float(not is_bounded)))


def _by_query_head(norms: NormSums | None, heads: int, device: torch.device, order: Sequence[int] = ()) -> NormSums:
    """Norms of each query head's key head; the groups lie side by side."""
    if norms is None or heads % len(norms.count):
        return NormSums.of(torch.zeros(heads, 0, 1, device=device))
    group = torch.arange(heads, device=norms.count.device) // (heads // len(norms.count))
    group = group[list(order)] if order else group
    return NormSums(*(getattr(norms, item.name).index_select(0, group) for item in fields(NormSums)))


def _added(part: Any) -> list[str]:
    return [item.name for item in fields(part) if item.name not in ("logit", "largest")]


def _is_in(path: str, name: str) -> bool:
    return path.startswith(f"{name}.") or (name == "" and path != "")


def _split(tensors: list[Tensor], first: int) -> tuple[list[Tensor], list[Tensor]]:
    return tensors[:first], tensors[first:]
