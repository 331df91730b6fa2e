"""What the loss trains each position to predict, by the gradient that arrives at the output, wherever it is computed.

Of a cross entropy it is softmax less one hot in each row: the label is alone on its side of zero, and zeros are
ignored. Labels of some rows are compared with the tokens that the model embeds, up to three places away. Beside the
label it is the softmax less a constant, in all rows times one factor: that form, the factor and the constant are facts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hdi_callback.attention.dtensors import is_sharded
from hdi_callback.attention.tape import Tape
from hdi_callback.checks.facts import embedded_tokens
from hdi_callback.guard import Guard, guarded
from hdi_callback.monitor.inputs import Numbers, UsualRanges
from hdi_callback.monitor.loss_path import COPIES, OUTPUT, LossPaths, node_name, path_to_loss
from hdi_callback.monitor.reading import StepFacts

LABELS, TARGET, LOSS = "labels", "target", "loss"
IGNORED, ELSEWHERE = "nothing at all", "no token up to three places away"
PARTLY = "one token at some of the positions alone"

_FARTHEST, _ROWS, _FEWEST, _SAMPLES, _TOKENS = 3, 128, 16, 8, 64
_READINGS, _STEADY, _ENTRIES = 5, 0.02, 2**21  # a focal loss begins as a cross entropy, and leaves it slowly
_FORM: Numbers = {
    "form": (0.05, float, "the loss is no plain cross entropy any more, as the gradient of {0} shows"),
    "factor": (0.1, float, "the loss is scaled by another factor than before, as the gradient of {0} shows"),
    "smoothing": (0.05, float, "labels of {0} are smoothed by {1}, and by {3} before"),
}


class LabelOffset(NamedTuple):
    """How many places ahead each position is trained to predict, of which tokens, and where it is trained."""

    offset: int
    tokens: list[Tensor]  # each time that they are looked up in a table
    is_trained: Tensor  # ``(samples, tokens)``, the first of them


class LossLabels:
    """Looks at the gradients of outputs."""

    def __init__(self) -> None:
        self._guard = Guard()
        self._tokens: list[Tensor] = []  # that the calls of this armed step have embedded
        self._hooks: list[Any] = []
        self._sums: list[tuple[Tensor, Tensor, Tensor]] = []  # tokens, numbers of rows, and which are trained
        self._forms: dict[str, Tensor] = {}  # of each output
        self._usual = UsualRanges(_FORM, _READINGS, _STEADY)
        self._paths: dict[str, frozenset[str]] = {}  # of each output
        self._usual_paths = LossPaths()

    def take(self, calls: int = 1) -> list[StepFacts]:
        """Return what gradients have shown since it was called last, in so many calls, and look at them no more."""
        sums, terms = self._sums, partial(_terms, [tokens for tokens, *_ in self._sums])
        forms, form = self._forms, partial(self._form, [*self._forms], self._paths, calls)
        for hook in self._hooks:
            hook.remove()
        self._tokens, self._hooks, self._sums, self._forms, self._paths = [], [], [], {}, {}
        facts = [StepFacts([tensor for _, *tensors in sums for tensor in tensors], terms)] if sums else []
        return facts + ([StepFacts([*forms.values()], form)] if forms or form.args[1] else [])

    @guarded("looking at what the loss trains")
    def note(self, tape: Tape, output: Any) -> None:
        """Look at the gradients of what a call returns that a tape has written down."""
        self._tokens += [tokens for step in tape.steps for tokens in embedded_tokens(step)]
        for at, tensor in enumerate(tree_leaves([*dict.values(output)] if isinstance(output, dict) else output)):
            if isinstance(tensor, Tensor) and tensor.dim() > 1 and tensor.grad_fn is not None and _has_rows(tensor):
                node, number = tensor.grad_fn, tensor.output_nr
                # The loss may be of what was cast to the output, as accelerate casts it.
                while node_name(node) in COPIES and node.next_functions[0][0] is not None:
                    node, number = node.next_functions[0]  # type: ignore[assignment]
                cast("Any", node).metadata[OUTPUT] = True
                rows, name = _some(tensor).softmax(-1), f"output {at}" if at else "the output"
                self._hooks.append(node.register_prehook(partial(self._look, number, rows, name)))

    @guarded("looking at what the loss trains")
    def _look(self, number: int, softmax: Tensor, name: str, gradients: Sequence[Tensor | None]) -> None:
        gradient = None if torch.compiler.is_compiling() else gradients[number]
        if gradient is not None and name not in self._paths:
            path = path_to_loss(torch._C._current_autograd_node())
            self._paths |= {} if path is None else {name: path}
        if gradient is None or gradient.shape[-1:] != softmax.shape[-1:] or is_sharded(gradient):
            return
        largest = torch.linalg.vector_norm(gradient, torch.inf, -1)
        if gradient.dtype != torch.float16 and len(rows := _some(gradient)) == len(softmax):  # which rounds to zero
            self._forms.setdefault(name, torch.stack(_fitted(rows, softmax, (largest != 0).sum())))
        is_trained = gradient.sum(-1, dtype=torch.float32).abs() < 0.1 * largest  # what is added to a loss is not even
        count, order = is_trained.sum(), is_trained.flatten().to(torch.uint8).argsort(descending=True, stable=True)
        places = order[torch.arange(_ROWS, device=order.device) * count // _ROWS]
        rows = gradient[torch.unravel_index(places, largest.shape)].float()
        total, size = rows.sum(-1), torch.linalg.vector_norm(rows, 1, -1)
        below, above = 2 * -rows.amin(-1) / (size - total), 2 * rows.amax(-1) / (size + total)
        label = torch.where(below >= above.nan_to_num(0), rows.argmin(-1), rows.argmax(-1))  # a reward may turn signs
        is_label = (torch.maximum(below, above) > 0.6) & (count > 0)
        offsets = torch.arange(-_FARTHEST, _FARTHEST + 1, device=label.device)[:, None]
        for tokens in self._tokens:
            if tokens.numel() != is_trained.numel() or tokens.device != label.device:
                continue
            numbers, flat = [(largest != 0).sum()[None]], tokens.flatten()
            for length, stride in ((tokens.shape[1], 1), tokens.shape):  # they may be ``(tokens, batch)``
                at = places // stride % length + offsets
                is_inside = (at >= 0) & (at < length) & is_label
                is_same = flat[(places + stride * offsets).clamp(0, len(flat) - 1)] == label
                numbers += [(is_same & is_inside).sum(1), is_inside.sum(1)]
            self._sums.append((tokens, torch.cat(numbers), is_trained.view(tokens.shape)[:_TOKENS, :_TOKENS]))

    def _form(
        self, names: Sequence[str], paths: Mapping[str, frozenset[str]], calls: int, *arrived: Tensor
    ) -> dict[tuple[str, int, str], Any]:
        """Return the terms of the contract on the loss: of each output its path, and how far its gradient is off."""
        departures = {name: self._usual_paths.departure(name, path) for name, path in paths.items()}
        terms: dict[tuple[str, int, str], Any] = {(f"{name} path", 0, LOSS): text for name, text in departures.items()}
        for name, (off, factor, smoothing) in zip(names, arrived):
            values = {"form": off[None].clamp(max=0.1)}
            place = f"{name} of {calls} calls" if calls > 1 else name  # of which some may not be trained
            if off < 0.05:
                # A loss scaler doubles and halves what is large.
                size = math.log(factor if factor < 1.5 else 16 * math.frexp(factor)[0]) if factor > 0 else math.nan
                pairs = {"factor": torch.tensor(size), "smoothing": smoothing}
                values |= {key: torch.stack([value, -value])[:, None] for key, value in pairs.items()}
            terms |= {(key, 0, LOSS): text for key, text in self._usual.departures(place, values).items()}
        return terms


def _has_rows(output: Tensor) -> bool:
    is_plain = output.layout == torch.strided and not output.is_nested and not is_sharded(output)
    return is_plain and output.is_floating_point() and output.numel() > 0


def _some(output: Tensor) -> Tensor:
    """Return some rows of an output or its gradient, the same of both."""
    rows = output.detach().flatten(0, -2)
    count = min(_ROWS, max(_SAMPLES, _ENTRIES // max(1, rows.shape[1])))
    return rows[torch.arange(count, device=rows.device) * len(rows) // count].float()


def _fitted(gradients: Tensor, softmax: Tensor, trained: Tensor) -> list[Tensor]:
    """Return how far gradients are off ``factor * (softmax - label)``, the factor times trained rows, and smoothing."""
    size = gradients.abs().amax()  # by a loss scaler it may be such that no square of it is finite
    gradients = gradients / size
    label = torch.zeros_like(softmax).scatter_(-1, gradients.argmin(-1, keepdim=True), 1)
    below = -gradients.clamp(max=0)  # of a row that is surer than its smoothed label asks, other entries than the label
    weights = (1 - label) * (below.amax(-1, keepdim=True) > 0.6 * below.sum(-1, keepdim=True))
    x, y = ((each * weights).sum() / weights.sum() for each in (softmax, gradients))
    factor = (weights * (softmax - x) * (gradients - y)).sum() / (weights * (softmax - x).square()).sum()
    constant = factor * x - y
    off = (weights * (gradients - factor * softmax + constant).square()).sum() / (weights * gradients.square()).sum()
    off = torch.where(weights.any(), off.sqrt().nan_to_num(1), torch.nan)  # labels alone may get a gradient
    return [off, factor * size * trained, constant / factor * softmax.shape[-1]]


def _terms(listed: Sequence[Tensor], *arrived: Tensor) -> dict[tuple[str, int, str], Any]:
    """Return the terms of the contract: what positions are trained to predict, and by which tokens that is known."""
    states: list[Any] = []  # a `LabelOffset`, one of three words, or nothing where it is not known
    for tokens, numbers, is_trained in zip(listed, arrived[::2], arrived[1::2]):
        count, sums = int(numbers[0]), numbers[1:].view(2, 2, -1)
        shares = torch.where(sums[:, 1] >= _FEWEST, sums[:, 0] / sums[:, 1], torch.nan)
        shares[1, _FARTHEST] = torch.nan  # the own token is the same along both axes
        agreeing = (shares >= 0.95).nonzero().tolist()
        if len(agreeing) == 1:
            axis, place = agreeing[0]
            states.append(LabelOffset(place - _FARTHEST, [tokens], (is_trained.T if axis else is_trained)[:_SAMPLES]))
        else:
            is_known, is_partly = not count or bool(shares[0].isfinite().any()), bool((shares >= 0.5).any())
            state = (PARTLY if not agreeing else None) if is_partly else ELSEWHERE if count else IGNORED
            states.append(state if is_known else None)
    trained = [state for state in states if isinstance(state, LabelOffset)]
    offsets = {each.offset for each in trained}
    if len(offsets) > 1 and 1 not in offsets:  # several outputs that look ahead beside what predicts the next token
        return {}
    if trained:
        ahead = next((each for each in trained if each.offset == 1), trained[-1])
        tables = [each.tokens[0] for each in trained if each.offset == ahead.offset]
        return {("", 0, LABELS): ahead.offset, ("", 0, TARGET): ahead._replace(tokens=tables)}
    return {} if None in states else {("", 0, LABELS): min(states, key=(IGNORED, PARTLY, ELSEWHERE).index)}
