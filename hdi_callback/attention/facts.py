"""Facts about an attention as it ran: how scores are scaled and masked, over what the softmax runs, what is rotated."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from hdi_callback.attention.cores import Core, Part
from hdi_callback.attention.heads import Claim, Map
from hdi_callback.attention.labels import Label, Labels
from hdi_callback.attention.planes import small, unique_rows
from hdi_callback.attention.tape import DATA, Cell, Step, View

__all__ = ["Facts", "Mask", "facts_of"]

_FAR = 40  # steps to walk back


@dataclass(frozen=True, eq=False)
class Mask:
    """What is done to scores so that some keys are not seen.

    Attributes:
        op: ``"add"``, ``"masked_fill"`` (True is hidden), ``"where"`` (True is kept), or ``"attn_mask"`` of a fused
            attention (True is kept; numbers are added).
        value: the mask, if it is small; as it is broadcast over the scores.
        is_behind: whether it is applied behind the softmax.
    """

    op: str
    value: Tensor | None
    is_behind: bool = False


@dataclass(frozen=True, eq=False)
class Facts:
    """What an attention does.

    Attributes:
        query: labels ``(n, queries, width)``: which row of which parameter, and which token, each element is.
        key: the same of keys.
        value: of values.
        heads: of each query ``(n, queries)``, its head; `None` where heads could not be told.
        output: columns of the output projections, by head.
        scale: what products of queries and keys are multiplied with; `None` if it is no plain number.
        masks: what hides keys, in order.
        is_causal: whether a fused attention is told to be.
        dropout: probability behind the softmax, 0 if there is none; `None` if it is not known.
        dim: dimension that the softmax runs over, counted from the end.
        size: its size.
        rotated: role -> pairs of places in a head whose features are mixed, as rotary positions do.
        line: file and line of the forward, if they are known.
    """

    query: Label
    key: Label
    value: Label
    heads: Tensor | None
    output: tuple[Map, ...]
    scale: float | None
    masks: tuple[Mask, ...]
    is_causal: bool
    dropout: float | None
    dim: int
    size: int
    rotated: dict[str, frozenset[tuple[int, int]]]
    line: str


def facts_of(labels: Labels, core: Core, claim: Claim | None = None) -> Facts:
    """Collect the facts of an attention.

    Args:
        labels: of the tape.
        core: the attention.
        claim: what was read of it; without, heads and output columns are missing.

    Returns:
        The facts.
    """
    part, step = core.parts[0], core.step
    scores = step.taken[0]
    scale, masks = _between(labels, core)
    dropout = step.given("dropout_p", 0.0) if part.product is None else _dropout_behind(step)
    return Facts(
        part.query,
        part.key,
        part.value,
        claim.numbers[0] if claim is not None else None,
        tuple(one for _, one in claim.outputs) if claim is not None else (),
        scale,
        masks,
        bool(step.given("is_causal", default=False)),
        dropout,
        core.dim,
        step.taken[1].shape[-2] if part.product is None else scores.shape[core.dim],
        {role: _pairs(labels, label) for role, label in (("query", part.query), ("key", part.key))},
        step.line,
    )


def _between(labels: Labels, core: Core) -> tuple[float | None, tuple[Mask, ...]]:
    """Follow scores from the product to the softmax, and queries and keys back to their maps."""
    step, part = core.step, core.parts[0]
    if part.product is None:
        given = step.given("attn_mask", step.given("attn_bias"))
        masks = [Mask("attn_mask", given.value)] if isinstance(given, View) else []
        scale = step.given("scale")
        scale = step.taken[0].shape[-1] ** -0.5 if scale is None else float(scale)
        cells = [view.cell for view in step.taken[:2]]
    else:
        found = _numbers(labels, step.taken[0].cell, core.score_step)
        scale, masks = found
        product = labels.products.of(core.score_step) if core.score_step is not None else None
        cells = [product.first.cell, product.second.cell] if product is not None else []
    for cell in cells:
        more, _ = _numbers(labels, cell, None)
        scale = None if scale is None or more is None else scale * more
    return scale, (*masks, *_masks_behind(part, step))


def _numbers(labels: Labels, cell: Cell, until: Step | None) -> tuple[float | None, list[Mask]]:
    """Walk back to a product; multiply the numbers on the way, and collect masks."""
    scale: float | None = 1.0
    masks: list[Mask] = []
    for _ in range(_FAR):
        step = cell.step
        if (
            step is None
            or step is until
            or ((product := labels.products.of(step)) is not None and product.kind == "weight")
        ):
            if step is not None and step is until and step.op == "baddbmm" and scale is not None:
                scale *= float(step.given("alpha", 1))
            break
        data = [view for view in step.taken if view.cell.kind == DATA and view.is_float and view.cell.is_mapped]
        if step.op in {"mul", "div"} and len(data) == 1:
            number = _number(step, data[0])
            scale = None if number is None or scale is None else scale * number
        elif step.op in {"masked_fill", "where", "add"} and until is not None:
            others = [view for view in step.taken if view not in data and view.shape]
            masks += [Mask(step.op, view.value) for view in others[:1]]
        if not data:
            break
        cell = data[0].cell
    return scale, masks[::-1]


def _number(step: Step, of: View) -> float | None:
    others = [one for one in step.args[:2] if one is not of]
    other = others[0] if others else None
    if isinstance(other, View):
        if other.cell.kind == DATA and other.numel > 1:
            return 1.0  # cosines of positions
        if other.numel > 1 or other.value is None:
            return None if other.numel == 1 else 1.0
        other = float(other.value)
    if not isinstance(other, (int, float)):
        return None
    return 1 / other if step.op == "div" else float(other)


def _masks_behind(part: Part, softmax: Step) -> list[Mask]:
    """Find masks between the softmax and the values."""
    if part.product is None:
        return []
    found, cell = [], part.product.first.cell
    for _ in range(_FAR):
        step = cell.step
        if step is None or step is softmax:
            break
        others = [view for view in step.taken if not view.cell.is_mapped and view.shape and view.numel > 1]
        if step.op in {"masked_fill", "where"} and others:
            found.append(Mask(step.op, others[0].value, is_behind=True))
        data = [view for view in step.taken if view.cell.kind == DATA and view.is_float and view.cell.is_mapped]
        if not data:
            break
        cell = data[0].cell
    return found


def _dropout_behind(softmax: Step) -> float | None:
    made = softmax.made[0]
    for user in made.cell.users if made is not None else ():
        if user.op == "native_dropout":
            return float(user.args[1])
        if user.op == "mul":
            for view in user.taken:
                cell: Cell | None = view.cell
                while cell is not None:
                    if cell.step is not None and cell.step.op == "bernoulli":
                        return 1 - float(cell.step.given("p", math.nan))
                    cell = cell.before
    return 0.0


def _pairs(labels: Labels, label: Label) -> frozenset[tuple[int, int]]:
    """Say which places of a head have the same two features."""
    rows, _ = unique_rows(small(label.features).reshape(-1, label.features.shape[-1])[:64])
    pairs: set[tuple[int, int]] = set()
    for row in rows.tolist():
        places: dict[int, list[int]] = {}
        for place, number in enumerate(row):
            if len(labels.members(number)) == 2:
                places.setdefault(number, []).append(place)
        pairs |= {(mine[0], mine[1]) for mine in places.values() if len(mine) == 2}
    return frozenset(pairs)
