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

from hdi_callback.attention.labels import Label, Labels, Unreadable
from hdi_callback.attention.operations import DROPOUTS, OF_SCORES, RANDOM, SHAPED_LIKE, SOFTMAX_LIKE
from hdi_callback.attention.replay import NotReplayedError, run_steps, steps_before
from hdi_callback.attention.tape import DATA, Cell, Step, View

__all__ = ["OF_SCORES", "Normaliser", "normaliser_before", "scores_behind"]

_MOST = 1 << 27  # numbers that are computed to try one
_FAR = 60


@dataclass(frozen=True, eq=False)
class Normaliser:
    """What makes weights of scores.

    Attributes:
        step: what gives the weights.
        scores: what they are made of.
        dim: the dimension over which they add up to one.
        name: what it is, in words.
        is_causal: whether it hides the keys behind a query.
    """

    step: Step
    scores: View
    dim: int
    name: str
    is_causal: bool


_Links = list[tuple[Step, View]]  # steps, each with what it takes of the scores


def normaliser_before(labels: Labels, product: Step) -> Normaliser | None:
    """Find what makes weights of scores in front of a product with values; `None` if there is no such thing.

    Args:
        labels: of the tape; those of scores are carried on to the weights.
        product: the product.

    Returns:
        What was found.

    Raises:
        Unreadable: if it cannot be tried.
    """
    found = (_tried(labels, start, links, product) for start, links in _ways_to(labels, product))
    return next((one for one in found if one is not None), None)


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
    """Walk back, element by element, to a product of two computed tensors."""
    todo: list[tuple[View, _Links]] = [(view, [])]
    for one, links in todo:  # it grows
        step, written = one.cell.step, one.cell.written
        if step is None or written is None or len(todo) > _FAR or step.number in labels.installed:
            continue
        product = labels.products.of(step)
        if product is not None and product.kind == "scores":
            return step, links
        if product is None and step.op not in SOFTMAX_LIKE:
            alike = [x for x in step.inputs if x.is_float and x.cell.kind == DATA and x.numel == written.numel]
            todo += [(x, [(step, x), *links]) for x in alike]
    return None, []


def _tried(labels: Labels, start: Step, links: _Links, product: Step) -> Normaliser | None:
    tape = labels.tape
    made_of = {id(one.cell) for one in start.outputs if one is not None}
    for step in tape.steps[start.number + 1 : product.number]:
        if step.op not in SHAPED_LIKE and any(id(view.cell) in made_of for view in step.inputs):
            made_of |= {id(one.cell) for one in step.outputs if one is not None}
    first = next((at for at, link in enumerate(links) if _leaves(*link, made_of)), None)
    if first is None:
        return None
    last = next(one for one in links[-1][0].outputs if one is not None)
    try:
        for at in range(first, -1, -1):  # nothing but the scores may lead to weights
            scores, named = links[at][1], dict[int, str]()
            steps = steps_before(last.cell, partial(_is_leaf, scores.cell, start, made_of, named))
            if not any(
                view.cell.step is start and view.cell is not scores.cell for one in steps for view in one.inputs
            ):
                break
        else:
            return None
        links = links[at:]
        if len(steps) * scores.numel > _MOST:
            raise NotReplayedError("its scores are too many: let the first batch be smaller")
        state = {**dict(tape.model.named_parameters()), **dict(tape.model.named_buffers())}
        known = {cell: state[name].detach().flatten().cpu() for cell, name in named.items()}
        draws = [draw(scores) for draw in (_mixed, _positive)]
        given = [_run(steps, scores, draw, known) for draw in draws]
    except NotReplayedError as error:
        raise Unreadable(f"what makes weights of its scores cannot be tried: {error}") from None
    except Exception:  # it is something else
        return None
    found: tuple[Step, int, list[Tensor]] | None = None
    for step, _ in links:
        writers = (writer for view in step.inputs for writer in view.cell.writers())
        if found and (step.op in DROPOUTS or any(writer.op in RANDOM | {"bernoulli"} for writer in writers)):
            break
        out = next(one for one in step.outputs if one is not None)
        if found and out.shape != scores.shape:
            break
        weights = [storages[id(out.cell)].as_strided(out.shape, out.stride, out.offset) for storages in given]
        dims = (dim for dim in range(-1, -len(out.shape) - 1, -1) if all(_adds_up(one, dim) for one in weights))
        if (dim := next(dims, None)) is not None:
            found = step, dim, weights  # some divide once more by the sum
    if found is None:
        return None
    step, dim, weights = found
    _carry_on(labels, links, step)
    step.path, step.line, step.padding = product.path, product.line, product.padding
    names = [_name(draw, one, dim) if draw.shape == one.shape else "" for draw, one in zip(draws, weights)]
    name = names[0] if names[0] == names[1] and names[0] else "weights that add up to one"
    return Normaliser(step, scores, dim, name, all(_is_causal(one, dim) for one in weights))


def _is_leaf(scores: Cell, start: Step, made_of: set[int], named: dict[int, str], cell: Cell) -> bool:
    if cell.step is None and (name := cell.parameter or cell.buffer) is not None:
        named[id(cell)] = name
    if cell is scores or cell.step is start:
        return True
    if id(cell) in made_of or cell.kind != DATA:
        return False
    return any(view.cell is cell and view.value is not None for user in cell.users for view in user.inputs)


def _leaves(step: Step, main: View, made_of: set[int]) -> bool:
    """Whether an operation does more to scores than scale, shift and hide them."""
    return step.op not in OF_SCORES or any(view is not main and id(view.cell) in made_of for view in step.inputs)


def _mixed(scores: View) -> Tensor:
    return 2 * torch.randn(scores.shape, generator=torch.Generator().manual_seed(0))


def _positive(scores: View) -> Tensor:
    return torch.rand(scores.shape, generator=torch.Generator().manual_seed(1)) + 0.1


def _run(steps: list[Step], scores: View, draw: Tensor, known: dict[int, Tensor]) -> dict[int, Tensor]:
    flat = torch.zeros(scores.cell.numel)
    flat.as_strided(scores.shape, scores.stride, scores.offset).copy_(draw)
    storages = {**known, id(scores.cell): flat}
    run_steps(steps, storages, _known, lambda name, value: _on_cpu(name, value))
    return storages


def _known(view: View) -> Tensor:
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
    one = (sums - 1).abs() < 1e-3
    return bool((one | (sums.abs() < 1e-3) | sums.isnan()).all()) and bool(one.float().mean() > 0.5)


def _is_causal(weights: Tensor, dim: int) -> bool:
    rows = weights if dim == -1 or weights.dim() == 1 else weights.mT
    is_square = dim >= -2 and rows.dim() > 1 and rows.shape[-2] == rows.shape[-1] > 2
    return is_square and not bool(rows.triu(1).any())


def _carry_on(labels: Labels, links: _Links, last: Step) -> None:
    """Let each tensor on the way from scores to weights have the labels of the scores."""
    for step, main in links:
        label = labels.read(main)
        out = step.outputs[0]
        if label is None or out is None:
            return
        labels.installed[step.number] = Label(label.features, label.tokens, label.flags).expanded(out.shape)
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
