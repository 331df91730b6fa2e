"""Measure what armed forwards show: head outputs and rows of attention, over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from hdi_callback.attention.capture.capture import Captured
from hdi_callback.attention.layer import AttentionLayer
from hdi_callback.core.covariance import ContributionSums, contribution_sums, covariance_term, outputs_not_finite
from hdi_callback.core.rows import RowSums, attention_rows, row_metrics
from hdi_callback.monitor.metrics import FINITE_OUTPUTS, OUTPUTS, ROWS
from hdi_callback.monitor.ranks import Ranks, chunks, failed, repeats_tokens
from hdi_callback.monitor.reading import Absent, Later, Result, stacked

_AT_ONCE = 2**24  # numbers that are stacked at once on a device
_AT_ONCE_ON_CPU = 2**19  # the same on a CPU, whose cache would not hold more
_LARGEST_LATER = 2**28  # bytes of samples that outlive the step in which they were taken

NOT_ARMED = "no forward was armed before this reading"  # as before the last one of a run, which reads final weights


class Samples(NamedTuple):
    """What was captured of layers of one shape."""

    tokens: Any  # ``(layers, tokens, H, d_v)``, head outputs; of rows the sums of each layer's runs
    weight: Tensor | None  # ``(layers, H, d_v, d)``, the output weight, for the covariance
    valid: Tensor | None  # ``(layers, tokens)``, false of padding; `None` if all count


class ForwardSource(NamedTuple):
    """A measurement of armed forwards."""

    name: str  # one of `FORWARD_SOURCES`
    reads: str  # the field of `Captured` that it is computed from
    sums: Callable[[Samples, bool], Any]  # samples, whether this is the only rank -> tensors ``(layers, ...)``
    blank: Callable[[AttentionLayer, torch.device], Any]  # sums over nothing, of the same shapes but for the layers
    finish: Callable[..., Any]  # layer, sums over all ranks of layers like it, on the host -> what the catalogue reads


class FinitenessSums(NamedTuple):
    """On how many ranks heads were read, and have outputs that are not finite, ``(layers, H)``."""

    ranks: Tensor
    not_finite: Tensor


def _finiteness(samples: Samples, is_alone: bool) -> FinitenessSums:
    bad = outputs_not_finite(samples.tokens, samples.valid).float()
    return FinitenessSums(torch.ones_like(bad), bad)


def _no_contributions(layer: AttentionLayer, device: torch.device) -> ContributionSums:
    count, own, whole = torch.zeros(3, dtype=torch.float64, device=device)
    total = torch.zeros(layer.num_heads, layer.weights["output"].in_features, dtype=torch.float64, device=device)
    return ContributionSums(count, total, own, whole)


def _no_rows(layer: AttentionLayer, device: torch.device) -> RowSums:
    unseen = torch.zeros(layer.num_heads, 1, 1, device=device)
    return attention_rows(unseen, unseen > 0, positions=torch.zeros(1, device=device))


def take_rows(logits: Tensor, weights: Tensor, *, positions: Tensor, visible: Tensor) -> list[tuple[RowSums, int]]:
    """Reduce sampled rows of some layers to sums, as `Capture` asks for: those of all, and the place of each layer."""
    sums = attention_rows(weights, visible, logits=logits, positions=positions, layers=True)
    return [(sums, place) for place in range(len(weights))]


def _added(runs: Sequence[Sequence[tuple[RowSums, int]]]) -> RowSums:
    """Add up what some layers have of each time that they ran, together."""
    totals = []
    for of_layers in zip(*runs):
        sums, places = of_layers[0][0], [place for _, place in of_layers]
        is_all = places == list(range(len(sums.queries)))
        totals.append(sums if is_all else RowSums(*(total[places] for total in sums)))
    return reduce(add, totals)


FORWARD = (
    ForwardSource(
        OUTPUTS,
        "outputs",
        lambda samples, is_alone: contribution_sums(
            samples.tokens, cast(Tensor, samples.weight), samples.valid, about_mean=is_alone
        ),
        _no_contributions,
        lambda layer, *sums: covariance_term(ContributionSums(*sums), layer.num_heads),
    ),
    ForwardSource(
        FINITE_OUTPUTS,
        "outputs",
        _finiteness,
        lambda layer, device: FinitenessSums(*torch.zeros(2, layer.num_heads, device=device)),
        lambda layer, ranks, not_finite: torch.where(ranks == 0, torch.nan, not_finite.clamp(max=1)),
    ),
    ForwardSource(
        ROWS,
        "rows",
        lambda samples, is_alone: _added(samples.tokens),
        _no_rows,
        lambda layer, *sums: row_metrics(RowSums(*sums)),
    ),
)
"""Everything that is measured of armed forwards."""


def measure_forwards(
    sources: Sequence[ForwardSource],
    layers: Sequence[AttentionLayer],
    captured: Mapping[str, Captured],
    output_weights: Callable[[Sequence[AttentionLayer]], tuple[list[Tensor], bool]],
    ranks: Ranks,
    absent: Absent,
) -> tuple[list[Result], list[Later]]:
    """Return results over all ranks, which all call this, or of a single rank what returns them later.

    Of a single rank there is one of each source for each group of layers of one shape. `captured`: layer -> what was
    captured on this rank. `output_weights` returns the output weights of layers, a collective call where ranks share
    them, and whether they are copies. What cannot be measured goes to `absent`.
    """
    for source in sources:
        for layer in layers:
            if why := _why_not(source, layer) or _why_nothing(source.reads, captured.get(layer.name)):
                absent.note(layer.name, source.name, why)
    results, later, held = list[Result](), list[Later](), 0
    is_alone = ranks.size == 1
    for reads in dict.fromkeys(source.reads for source in sources):
        of_field = [source for source in sources if source.reads == reads]
        broken = {name for name, of_layer in captured.items() if reads in of_layer.failed}
        counted = {
            layer.name: captured[layer.name]
            for layer in layers
            if layer.name not in broken
            and not _why_nothing(reads, captured.get(layer.name))
            and (is_alone or not repeats_tokens(layer))  # ranks that share the heads of a layer have the same tokens
        }
        measured: list[Result] = []
        for batch in _batches(reads, layers, counted, ranks):
            able = [source for source in of_field if not _why_not(source, batch[0])]
            with absent.unless([source.name for source in able], [layer.name for layer in batch]):
                needs_weights = any(source.name == OUTPUTS for source in able)
                weights, are_copies = output_weights(batch) if needs_weights else ([], False)
                samples = [counted[layer.name] for layer in batch if layer.name in counted]
                measure = partial(_measured, able, batch, reads, samples, weights, is_alone)
                held += sum(each.outputs.nbytes for each in samples if each.outputs is not None)
                if is_alone and are_copies and held <= _LARGEST_LATER:
                    later.append(measure)
                else:
                    measured += measure(absent)
        results += measured if is_alone else _over_ranks(of_field, layers, measured, broken | counted.keys(), ranks)
    return results, later


def _measured(
    sources: Sequence[ForwardSource], layers: Sequence[AttentionLayer], reads: str, captured: Sequence[Captured],
    weights: Sequence[Tensor], is_alone: bool, absent: Absent,
) -> list[Result]:  # fmt: skip
    """Return a result of each source, of what was captured of some layers alike; none if nothing was."""
    results, names = list[Result](), tuple(layer.name for layer in layers)
    if not captured:
        return results
    with absent.unless([source.name for source in sources], names):
        samples = _stacked(captured, reads, stacked(weights) if weights else None)
        for source in sources:
            with absent.unless([source.name], names):
                sums = source.sums(samples, is_alone)
                results.append(Result(source.name, names, sums, partial(source.finish, layers[0])))
    return results


def _over_ranks(
    sources: Sequence[ForwardSource], layers: Sequence[AttentionLayer], measured: Sequence[Result],
    expected: Collection[str], ranks: Ranks,
) -> list[Result]:  # fmt: skip
    """Return results over all ranks; of layers that are `expected` to have been measured here and were not, NaN."""
    own: dict[tuple[str, str], Any] = {}  # source and layer -> sums of this rank
    for result in measured:
        of_layers = zip(*(tensor.unbind() for tensor in result.sums))
        own |= {(result.source, name): type(result.sums)(*sums) for name, sums in zip(result.layers, of_layers)}
    results = []
    for source in sources:
        able = [layer for layer in layers if not _why_not(source, layer)]
        for layer in able:
            if (source.name, layer.name) not in own:
                blank = source.blank(layer, ranks.device)
                own[source.name, layer.name] = failed(blank) if layer.name in expected else blank
        for layer, total in zip(able, ranks.add([own[source.name, layer.name] for layer in able])):
            sums = [part[None] for part in total]
            results.append(Result(source.name, (layer.name,), sums, partial(source.finish, layer)))
    return results


def _why_not(source: ForwardSource, layer: AttentionLayer) -> str:
    """Return why a layer cannot be measured, by facts that are the same on every rank; empty if it can."""
    has_weight = source.name != OUTPUTS or "output" in layer.weights
    return "" if has_weight else "the layer has no output weight of its own"


def _why_nothing(reads: str, captured: Captured | None) -> str:
    """Return why this rank has nothing of a layer in a field of `Captured`; empty if it has."""
    if captured is None:
        return NOT_ARMED
    value = getattr(captured, reads)
    if isinstance(value, Tensor) or value:
        return ""
    return captured.reasons.get(reads) or "the layer was not called in a forward that was armed"


def _batches(
    reads: str, layers: Sequence[AttentionLayer], counted: Mapping[str, Captured], ranks: Ranks
) -> list[list[AttentionLayer]]:
    """Return layers that are measured in one call; each alone where weights are gathered, in one order on all ranks."""
    if ranks.is_sharded:
        return [[layer] for layer in layers]
    groups: dict[Any, list[AttentionLayer]] = {}
    for layer in layers:
        if layer.name in counted:
            of_layer, weight = counted[layer.name], layer.weights.get("output")
            tensor = of_layer.rows[0][0].entropy if reads == "rows" else of_layer.outputs
            runs = tuple(id(sums) for sums, _ in of_layer.rows) if reads == "rows" else ()  # with the same layers
            kind = _kind(tensor), _kind(of_layer.valid), None if weight is None else weight.in_features, runs
            groups.setdefault(kind, []).append(layer)
    batches: list[list[AttentionLayer]] = []
    for ((shape, _, device), *_), group in groups.items():
        at_once = _AT_ONCE_ON_CPU if device.type == "cpu" else _AT_ONCE
        batches += chunks(group, [math.prod(shape)] * len(group), at_once)
    return batches


def _stacked(captured: Sequence[Captured], reads: str, weight: Tensor | None) -> Samples:
    """Stack what was captured of layers."""
    if reads == "rows":
        return Samples([of_layer.rows for of_layer in captured], weight, None)
    valid = [of_layer.valid for of_layer in captured if of_layer.valid is not None]
    tokens = stacked([of_layer.outputs for of_layer in captured if of_layer.outputs is not None])
    return Samples(tokens, weight, stacked(valid) if valid else None)


def _kind(tensor: Tensor | None) -> Any:
    """Return what tensors must have alike to be stacked."""
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)
