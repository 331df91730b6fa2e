"""The block around an attention: whether what it gives is added to its input, and where norms are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hdi_callback.attention.discovery.heads import FoundAttention
from hdi_callback.attention.discovery.labels import Labels
from hdi_callback.attention.operations import FUSED, KEEPS, MOVES, NORMS, REDUCTIONS
from hdi_callback.attention.tape import DATA, MADE, WEIGHT, Cell, Step, View, WalkOn, walk_back
from hdi_callback.checks.scores import links_back, sides_of

ALONE = "attention(x), and its input is not added"
UNUSED = "x, and what attention gives is not used"
_FAR = 400  # steps
_SCALES = KEEPS | {"mul", "div"}


@dataclass
class _Downstream:
    """What is computed of a content, up to the next maps."""

    is_normed: dict[Cell, bool]  # of each content, whether a norm is on the way
    sums: list[tuple[Step, View, bool]] = field(default_factory=list)  # with what, and whether a norm is on the way
    maps: list[bool] = field(default_factory=list)  # whether a norm is on the way to each
    joined: list[Cell] = field(default_factory=list)  # what else enters a step on the way


def block_of(labels: Labels, attn: FoundAttention) -> str | None:
    """Return the block, as ``"x + attention(norm(x))"``, or `None`."""
    product = attn.core.parts[0].product
    values = attn.core.step.inputs[2] if product is None else product.second
    sides = [view.cell for view in [*sides_of(labels, attn.core), values]]
    inputs = [_inputs_of_maps(labels, cell) for cell in sides]
    if not inputs[0] or not attn.takers:
        return None
    result = attn.takers[0][0].output.cell
    if not result.users:
        return UNUSED
    downstream = _Downstream({result: False})
    for step, addend, is_normed in _sums(labels, downstream, through_sums=True):
        before = _downstream(labels, _source(addend.cell)).is_normed
        if step.op != "add" or before.keys().isdisjoint(inputs[0]):
            continue
        names = {True: "norm(x)", False: "x", None: "y"}
        roles = [names[next((before[cell] for cell in cells if cell in before), None)] for cells in inputs]
        inner = f"attention({', '.join(roles[: 1 if len(set(roles)) == 1 else 3])})"
        text = f"x + {f'norm({inner})' if is_normed else inner}"
        after = _downstream(labels, step.output.cell)
        is_post = bool(after.sums) and all([*after.maps, *(normed for _, _, normed in after.sums)])
        return f"norm({text})" if is_post else text
    last = -1 if result.step is None else result.step.number
    streams = (cell for cell in walk_back(sides, _made_of) if cell.is_mapped or cell.kind == DATA)
    streams = (cell for cell in streams if cell.kind != WEIGHT and cell.numel >= result.numel)
    is_used = any(user.number > last for cell in streams for user in cell.users)
    # What is joined with it may hold the input, as where attentions stand side by side.
    joined = walk_back(downstream.joined, lambda cell: [] if cell is result else _made_of(cell))
    is_used = is_used or not set(inputs[0]).isdisjoint(joined)
    is_alike = result.numel in {cell.numel for cell in inputs[0]}  # else it cannot take the place of its input
    return ALONE if is_alike and not is_used else None


def _inputs_of_maps(labels: Labels, cell: Cell) -> list[Cell]:
    """Return what the nearest map before a content takes, and the one before that, as of a low rank."""
    inputs: list[Cell] = []
    while len(inputs) < 2:
        links = links_back(cell, labels.products.is_projection)
        step = None if links is None else links[0].main.cell.step if links else cell.step
        product = labels.products.of(step)
        if product is None:
            break
        cell = product.first.cell
        inputs.append(cell)
    return inputs


def _downstream(labels: Labels, cell: Cell) -> _Downstream:
    downstream = _Downstream({cell: False})
    downstream.sums += _sums(labels, downstream)
    return downstream


def _sums(labels: Labels, downstream: _Downstream, *, through_sums: bool = False) -> Iterator[tuple[Step, View, bool]]:
    walk = WalkOn(list(downstream.is_normed), _FAR)
    for step in walk:
        is_after = any(downstream.is_normed.get(view.cell, False) for view in step.inputs)
        operands = [v for v in step.inputs if v.is_float and v.cell not in downstream.is_normed and len(v.shape) > 1]
        is_unknown = any(view.cell.kind in {WEIGHT, MADE} for view in operands) and not step.is_pointwise
        if labels.products.of(step) is not None or step.op in FUSED or (is_unknown and step.op not in MOVES):
            downstream.maps.append(is_after)
            continue
        downstream.joined += [view.cell for view in operands]
        if step.op in {"add", "cat"} and operands and operands[0].shape[-2:] == step.output.shape[-2:]:
            yield step, operands[0], is_after
            if not through_sums and not is_after and operands[0].cell.kind == DATA:  # behind a norm it is a shift
                continue
        for output in step.outputs:
            if output is not None:
                downstream.is_normed.setdefault(output.cell, is_after or step.op in NORMS or step.op in REDUCTIONS)
        walk.follow(step)


def _source(cell: Cell) -> Cell:
    """Return what a content is a copy of, or that by a factor that is learned or fixed."""
    while cell.step is not None and cell.step.op in _SCALES:
        sources = [view.cell for view in cell.step.inputs if view.cell.kind > MADE or cell.step.op in KEEPS]
        if len(sources) != 1:
            break
        cell = sources[0]
    return cell


def _made_of(cell: Cell) -> list[Cell]:
    if cell.step is None:
        return []
    return [*(view.cell for view in cell.step.inputs if view.is_float), *([cell.before] if cell.before else [])]
