"""What the loss trains each position to predict, by the gradient that arrives at the output, wherever it is computed.

Of a cross entropy it is softmax less one hot in each row: the label is alone on its side of zero, and zeros are
ignored. Labels of some rows are compared with the tokens that the model embeds, up to three places away. Of any loss
the operations that lead from the output to it are facts.
"""

from __future__ import annotations

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
from hdi_callback.monitor.loss_path import COPIES, OUTPUT, LossPaths, node_name, path_to_loss
from hdi_callback.monitor.reading import StepFacts

LABELS, TARGET, LOSS = "labels", "target", "loss"
IGNORED, ELSEWHERE = "nothing at all", "no token up to three places away"
PARTLY = "one token at some of the positions alone"

_FARTHEST, _ROWS, _FEWEST, _SAMPLES, _TOKENS = 3, 128, 16, 8, 64


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
        self._paths: dict[str, frozenset[str]] = {}  # of each output
        self._usual_paths = LossPaths()

    def take(self) -> list[StepFacts]:
        """Return what gradients have shown since it was called last, and look at them no more."""
        sums, terms = self._sums, partial(_terms, [tokens for tokens, *_ in self._sums])
        of_paths = [StepFacts([], partial(self._terms_of_paths, self._paths))] if self._paths else []
        for hook in self._hooks:
            hook.remove()
        self._tokens, self._hooks, self._sums, self._paths = [], [], [], {}
        of_labels = [StepFacts([tensor for _, *tensors in sums for tensor in tensors], terms)] if sums else []
        return of_labels + of_paths

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
                look = partial(self._look, number, tensor.shape[-1], f"output {at}" if at else "the output")
                self._hooks.append(node.register_prehook(look))

    @guarded("looking at what the loss trains")
    def _look(self, number: int, width: int, name: str, gradients: Sequence[Tensor | None]) -> None:
        gradient = None if torch.compiler.is_compiling() else gradients[number]
        if gradient is not None and name not in self._paths:
            path = path_to_loss(torch._C._current_autograd_node())
            self._paths |= {} if path is None else {name: path}
        if gradient is None or gradient.shape[-1:] != (width,) or is_sharded(gradient):
            return
        rows, device = gradient.numel() // width, gradient.device
        of_rows = [tokens for tokens in self._tokens if tokens.numel() == rows and tokens.device == device]
        if not of_rows:
            return
        largest = torch.linalg.vector_norm(gradient, torch.inf, -1)
        is_trained = gradient.sum(-1, dtype=torch.float32).abs() < 0.1 * largest  # what is added to a loss is not even
        count, order = is_trained.sum(), is_trained.flatten().to(torch.uint8).argsort(descending=True, stable=True)
        places = order[torch.arange(_ROWS, device=order.device) * count // _ROWS]
        some = gradient[torch.unravel_index(places, largest.shape)].float()
        total, size = some.sum(-1), torch.linalg.vector_norm(some, 1, -1)
        below, above = 2 * -some.amin(-1) / (size - total), 2 * some.amax(-1) / (size + total)
        label = torch.where(below >= above.nan_to_num(0), some.argmin(-1), some.argmax(-1))  # a reward may turn signs
        is_label = (torch.maximum(below, above) > 0.6) & (count > 0)
        offsets = torch.arange(-_FARTHEST, _FARTHEST + 1, device=label.device)[:, None]
        for tokens in of_rows:
            numbers, flat = [(largest != 0).sum()[None]], tokens.flatten()
            for length, stride in ((tokens.shape[1], 1), tokens.shape):  # they may be ``(tokens, batch)``
                at = places // stride % length + offsets
                is_inside = (at >= 0) & (at < length) & is_label
                is_same = flat[(places + stride * offsets).clamp(0, len(flat) - 1)] == label
                numbers += [(is_same & is_inside).sum(1), is_inside.sum(1)]
            self._sums.append((tokens, torch.cat(numbers), is_trained.view(tokens.shape)[:_TOKENS, :_TOKENS]))

    def _terms_of_paths(self, paths: Mapping[str, frozenset[str]]) -> dict[tuple[str, int, str], Any]:
        """Return the terms of the contract on the loss: of each output how its path differs from those before."""
        return {(name, 0, LOSS): self._usual_paths.departure(name, path) for name, path in paths.items()}


def _has_rows(output: Tensor) -> bool:
    is_plain = output.layout == torch.strided and not output.is_nested and not is_sharded(output)
    return is_plain and output.is_floating_point() and output.numel() > 0


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
