"""What makes weights of scores in place of a softmax: entmax, sparsemax, a ReLU over its sum.

It is known by what it does and not by a name. The operations between a product of queries and keys and one with values
run again on scores that are made up; what adds up to one over a dimension, and is not negative, are weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hdi_callback.attention import operations as ops
from hdi_callback.attention.discovery.labels import Labels, Unreadable
from hdi_callback.attention.replay import NotReplayedError, run_steps, steps_before
from hdi_callback.attention.tape import DATA, Cell, Step, View

__all__ = ["Normaliser", "normaliser_before", "scores_behind"]

_MOST = 1 << 27  # numbers that are computed to try one
_FAR = 60


@dataclass(frozen=True, eq=False)
class Normaliser:
    """What makes weights of scores."""

    step: Step  # what returns the weights
    scores: View  # what they are made of
    dim: int  # the dimension over which they add up to one
    name: str  # what it is, in words
    is_causal: bool  # whether it hides the keys after a query


_Links = list[tuple[Step, View]]  # steps, each with what it takes of the scores


def normaliser_before(labels: Labels, product: Step) -> Normaliser | None:
    """Return what makes weights of scores before a product with values, `None` if nothing does.

    Labels of the scores are carried on to the weights. What cannot be tried raises `Unreadable`.
    """
    tried = (_tried(labels, start, links, product) for start, links in _ways_to(labels, product))
    return next((normaliser for normaliser in tried if normaliser is not None), None)


def scores_behind(labels: Labels, product: Step) -> Step | None:
    """Return the product of queries and keys that a product with values may belong to, with a normaliser between."""
    return next((start for start, _ in _ways_to(labels, product)), None)


def _ways_to(labels: Labels, product: Step) -> Iterator[tuple[Step, _Links]]:
    factors = labels.products.of(product)
    if factors is None or factors.kind != "scores" or product.number in labels.installed:
        return
    for view in (factors.first, factors.second):
        start, links = _links_to(labels, view)
        if start is not None and links:
            yield start, links


def _links_to(labels: Labels, view: View) -> tuple[Step | None, _Links]:
    """Return the product of two computed tensors that a tensor comes from, and the operations between."""
    todo: list[tuple[View, _Links]] = [(view, [])]
    for current, links in todo:  # it grows
        step, written = current.cell.step, current.cell.written
        if step is None or written is None or len(todo) > _FAR or step.number in labels.installed:
            continue
        product = labels.products.of(step)
        if product is not None and product.kind == "scores":
            return step, links
        if product is None and step.op not in ops.SOFTMAX_LIKE:
            alike = [x for x in step.inputs if x.is_float and x.cell.kind == DATA and x.numel == written.numel]
            todo += [(x, [(step, x), *links]) for x in alike]
    return None, []


def _tried(labels: Labels, start: Step, links: _Links, product: Step) -> Normaliser | None:
    """Return the last operation after which scores that are drawn add up to one, with its name."""
    of_scores = {view.cell for view in start.outputs if view is not None}
    for step in labels.tape.steps[start.number + 1 : product.number]:
        if step.op not in ops.SHAPED_LIKE and any(view.cell in of_scores for view in step.inputs):
            of_scores |= {view.cell for view in step.outputs if view is not None}
    first = next((at for at, link in enumerate(links) if _leaves(*link, of_scores)), None)
    if first is None:
        return None
    try:
        trial = _trial(labels, start, links, first, of_scores)
    except NotReplayedError as error:
        raise Unreadable(f"what makes weights of its scores cannot be tried: {error}") from None
    except Exception:  # it is something else
        return None
    if trial is None:
        return None
    links, draws, storages_of_draws = trial
    scores = links[0][1]
    last: tuple[Step, int, list[Tensor]] | None = None
    for step, _ in links:
        writers = (writer for view in step.inputs for writer in view.cell.writers())
        is_dropout = step.op in ops.DROPOUTS or any(writer.op in ops.RANDOM | {"bernoulli"} for writer in writers)
        out = step.output
        if last and (is_dropout or out.shape != scores.shape):
            break
        weights = [
            storages[id(out.cell)].as_strided(out.shape, out.stride, out.offset) for storages in storages_of_draws
        ]
        dims = (dim for dim in range(-1, -len(out.shape) - 1, -1) if all(_adds_up(plane, dim) for plane in weights))
        if (dim := next(dims, None)) is not None:
            last = step, dim, weights  # some divide once more by the sum
    if last is None:
        return None
    step, dim, weights = last
    _carry_on(labels, links, step)
    step.path, step.line, step.padding = product.path, product.line, product.padding
    names = {_name(draw, rows, dim) if draw.shape == rows.shape else "" for draw, rows in zip(draws, weights)}
    name = names.pop() if len(names) == 1 else ""
    is_causal = all(_is_causal(rows, dim) for rows in weights)
    return Normaliser(step, scores, dim, name or "weights that add up to one", is_causal)


def _trial(
    labels: Labels, start: Step, links: _Links, first: int, of_scores: set[Cell]
) -> tuple[_Links, list[Tensor], list[dict[int, Tensor]]] | None:
    """Return the operations from scores to weights, scores that are drawn, and what each operation makes of these."""
    last, model = links[-1][0].output, labels.tape.model
    for at in range(first, -1, -1):  # nothing but the scores may lead to weights
        scores, stored = links[at][1], dict[int, str]()
        steps = steps_before(last.cell, partial(_is_leaf, scores.cell, start, of_scores, stored))
        inputs = (view.cell for step in steps for view in step.inputs)
        if not any(cell.step is start and cell is not scores.cell for cell in inputs):
            break
    else:
        return None
    if len(steps) * scores.numel > _MOST:
        raise NotReplayedError("its scores are too many: let the first batch be smaller")
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    contents = {cell: state[name].detach().flatten().cpu() for cell, name in stored.items()}
    draws = [draw(scores) for draw in (_mixed, _positive)]
    return links[at:], draws, [_run(steps, scores, draw, contents) for draw in draws]


def _is_leaf(scores: Cell, start: Step, of_scores: set[Cell], stored: dict[int, str], cell: Cell) -> bool:
    if cell.step is None and (name := cell.parameter or cell.buffer) is not None:
        stored[id(cell)] = name
    if cell is scores or cell.step is start:
        return True
    if cell in of_scores or cell.kind != DATA:
        return False
    return any(view.cell is cell and view.value is not None for user in cell.users for view in user.inputs)


def _leaves(step: Step, main: View, of_scores: set[Cell]) -> bool:
    """Whether an operation does more to scores than scale, shift and hide them."""
    return step.op not in ops.OF_SCORES or any(view is not main and view.cell in of_scores for view in step.inputs)


def _mixed(scores: View) -> Tensor:
    return 2 * torch.randn(scores.shape, generator=torch.Generator().manual_seed(0))


def _positive(scores: View) -> Tensor:
    return torch.rand(scores.shape, generator=torch.Generator().manual_seed(1)) + 0.1


def _run(steps: list[Step], scores: View, draw: Tensor, contents: dict[int, Tensor]) -> dict[int, Tensor]:
    flat = torch.zeros(scores.cell.numel)
    flat.as_strided(scores.shape, scores.stride, scores.offset).copy_(draw)
    storages = {**contents, id(scores.cell): flat}
    run_steps(steps, storages, _value_of, _on_cpu)
    return storages


def _value_of(view: View) -> Tensor:
    """Return what a mask or a number was, as far as the tape has kept it."""
    value = view.value
    if value is None:
        raise NotReplayedError("they depend on a tensor whose values are not kept")
    for dim, size in enumerate(view.shape):  # of large ones the beginning
        value = value.cpu().index_select(dim, torch.arange(size).clamp(max=max(0, value.shape[dim] - 1)))
    return value.float() if view.is_float else value


def _on_cpu(name: str, value: Any) -> Any:
    if name == "device" and value is not None:
        return torch.device("cpu")
    return torch.float32 if name == "dtype" and value is not None and value.is_floating_point else value


def _adds_up(weights: Tensor, dim: int) -> bool:
    """Whether weights add up to one, or to nothing where nothing is seen, and most do to one."""
    if weights.shape[dim] < 2 or not weights.is_floating_point() or bool((weights < -1e-5).any()):
        return False
    sums = weights.sum(dim)
    is_one = (sums - 1).abs() < 1e-3
    return bool((is_one | (sums.abs() < 1e-3) | sums.isnan()).all()) and bool(is_one.float().mean() > 0.5)


def _is_causal(weights: Tensor, dim: int) -> bool:
    rows = weights if dim == -1 or weights.dim() == 1 else weights.mT
    is_square = dim >= -2 and rows.dim() > 1 and rows.shape[-2] == rows.shape[-1] > 2
    return is_square and not bool(rows.triu(1).any())


def _carry_on(labels: Labels, links: _Links, last: Step) -> None:
    """Label each tensor on the way from scores to weights as the scores are."""
    for step, main in links:
        label = labels.read(main)
        if label is None:
            return
        labels.installed[step.number] = label.expanded(step.output.shape)
        if step is last:
            return


# names


def _sparsemax(x: Tensor) -> Tensor:
    """Project on the simplex (Martins and Astudillo 2016)."""
    ordered = x.sort(-1, descending=True).values
    count = torch.arange(1, x.shape[-1] + 1)
    sums = ordered.cumsum(-1) - 1
    size = (count * ordered > sums).sum(-1, keepdim=True)
    return (x - sums.gather(-1, size - 1) / size).clamp(min=0)


def _entmax(x: Tensor) -> Tensor:
    """Entmax of order 1.5 (Peters, Niculae and Martins 2019)."""
    ordered = (x / 2).sort(-1, descending=True).values
    count = torch.arange(1, x.shape[-1] + 1)
    mean = ordered.cumsum(-1) / count
    spread = count * (ordered.square().cumsum(-1) / count - mean.square())
    threshold = mean - ((1 - spread) / count).clamp(min=0).sqrt()
    size = (threshold <= ordered).sum(-1, keepdim=True)
    return (x / 2 - threshold.gather(-1, size - 1)).clamp(min=0).square()


def _over_its_sum(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True).clamp_min(1e-9)


_NAMES: dict[str, Callable[[Tensor], Tensor]] = {
    "sparsemax": _sparsemax,
    "entmax of order 1.5": _entmax,
    "ReLU over its sum": lambda x: _over_its_sum(x.relu()),
    "squared ReLU over its sum": lambda x: _over_its_sum(x.relu().square()),
    "sigmoid over its sum": lambda x: _over_its_sum(x.sigmoid()),
}


def _name(scores: Tensor, weights: Tensor, dim: int) -> str:
    for name, function in _NAMES.items():
        expected = function(scores.movedim(dim, -1)).movedim(-1, dim)
        if torch.allclose(expected, weights, atol=1e-3):
            return name
    return ""
