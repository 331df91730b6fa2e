"""Prove what is said of a module by hand: change one element of a weight at a time, and see which head notices.

The functions that compute attention weights are replaced while the module runs; nothing of the package is used.

- A row of the queries changes the scores of its head in the row of one token, a row of the keys in its column. To have
  one token alone notice, the feature that the changed element multiplies is zero in all others.
- A row of the values, and a column of the output projection, change what the module gives when all heads but theirs are
  silenced, and not when theirs is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild import idioms
from tests.attention.wild.truth import BATCH, Case, Core, Rows, parts_of

TOKEN = 3  # so that a causal mask leaves it several keys and several queries
CHANGE = 1e-2
NOTICED = 1e-10  # of float64
MASK = 1e6  # what is larger masks


class _Heads:
    """Sees the scores of each softmax, and silences heads."""

    def __init__(self) -> None:
        self.scores: list[tuple[Tensor, int]] = []
        self.silence: Callable[[Tensor, int], Tensor] | None = None
        self.at = range(1)
        self.kept: list[Tensor] = []
        self.frozen: list[Tensor] | None = None  # weights to use in place of those that the scores give
        self._is_inside = False

    def _weights(self, scores: Tensor, dim: int, compute: Callable[[], Tensor]) -> Tensor:
        if self._is_inside:
            return compute()
        self._is_inside = True
        try:
            weights = compute()
        finally:
            self._is_inside = False
        self.kept.append(weights)
        if self.frozen is not None and len(self.scores) in self.at:
            weights = self.frozen[len(self.scores)]
        self.scores.append((scores.detach().clone(), dim % scores.dim()))
        if self.silence is not None and len(self.scores) - 1 in self.at:
            weights = self.silence(weights, len(self.scores) - 1)
        return weights

    def softmax(self, original: Any) -> Any:
        def run(input: Tensor, dim: int = -1, *args: Any, **kwargs: Any) -> Tensor:
            return self._weights(input, dim, lambda: original(input, dim, *args, **kwargs))

        return run

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
                  is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
        if enable_gqa:
            k, v = (one.repeat_interleave(q.shape[-3] // one.shape[-3], -3) for one in (k, v))
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if attn_mask is not None:
            attn_mask = attn_mask.log() if attn_mask.dtype == torch.bool else attn_mask
            scores = scores + attn_mask.to(scores.dtype)
        return self._weights(scores, -1, lambda: scores.softmax(-1)) @ v


@contextmanager
def _watched(heads: _Heads) -> Iterator[None]:
    heads.scores, heads.kept = [], []
    places = [
        (F, "softmax"),
        (torch, "softmax"),
        (Tensor, "softmax"),
        (idioms, "sparsemax"),
        (idioms, "softmax_by_hand"),
    ]
    patches = [patch.object(owner, name, heads.softmax(getattr(owner, name))) for owner, name in places]
    patches.append(patch.object(F, "scaled_dot_product_attention", heads.attention))
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()


def make_inputs(case: Case, dtype: torch.dtype = torch.float32, seed: int = 1, batch: int = BATCH) -> list[Tensor]:
    """Make inputs of the shapes that a case names: letters b, n (tokens), m (other tokens), c (features), x, y."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"b": batch, "n": case.tokens, "m": case.tokens + 2, "c": 24, "x": 4, "y": 4}
    shapes = [[sizes.get(letter) or int(letter) for letter in pattern.split()] for pattern in case.inputs]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def run(case: Case, module: nn.Module, inputs: list[Tensor]) -> Any:
    return case.call(module, *inputs) if case.call is not None else module(*inputs)


def first_tensor(answer: Any) -> Tensor:
    """Give the first tensor of what a module returned."""
    while not isinstance(answer, Tensor):
        if isinstance(answer, dict):
            answer = next(iter(answer.values()))
        elif isinstance(answer, (tuple, list)):
            answer = answer[0]
        else:
            answer = next(value for value in vars(answer).values() if isinstance(value, Tensor))
    return answer


def randomize(module: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter random values, gains and biases too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                width = parameter.shape[-1] if parameter.dim() > 1 else 4
                values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_((values / math.sqrt(width)).to(parameter.dtype))
    return module


class Proof:
    """A case in double precision, run again and again."""

    def __init__(self, case: Case, step: int = 1) -> None:
        self.case = case
        self.step = step  # every row of a head, or every `step`-th
        self.model = randomize(case.make().double()).train()
        for part in self.model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        self.heads = _Heads()
        self.inputs = make_inputs(case, torch.float64)
        self.silenced: tuple[Rows, int, int] | None = None

    def scores(self) -> list[tuple[Tensor, int]]:
        self._run()
        return list(self.heads.scores)

    def _run(self) -> Tensor:
        inputs, hooks = list(self.inputs), []
        if self.silenced is not None:
            part, feature, token = self.silenced
            if part.source is None:
                inputs[part.takes] = _only_one(inputs[part.takes], self.case.inputs[part.takes].split(), feature, token)
            else:
                source = self.model.get_submodule(part.source)

                def hook(module: Any, args: Any, output: Tensor) -> Tensor:
                    return _only_one(output, ["b", "n", "c"], feature, token)

                hooks.append(source.register_forward_hook(hook))
        try:
            with torch.no_grad(), _watched(self.heads):
                torch.manual_seed(0)
                return first_tensor(run(self.case, self.model, inputs)).clone()
        finally:
            for one in hooks:
                one.remove()

    @contextmanager
    def changed(self, parameter: str, element: int) -> Iterator[None]:
        values = self.model.get_parameter(parameter).data.view(-1)
        before = values[element].item()
        values[element] = before + CHANGE
        try:
            yield
        finally:
            values[element] = before

    # Scores

    def _laid_out(self, core: Core, scores: list[tuple[Tensor, int]]) -> Tensor:
        """``(b, h, q, k, windows)``"""
        count = core.heads if core.loop else 1
        if len(scores) < core.number + count:
            raise LookupError(f"{len(scores)} softmaxes ran, number {core.number + count - 1} was named")
        dims = {dim for _, dim in scores[core.number : core.number + count]}
        if "(" not in core.scores and not core.loop and core.scores.split()[dims.pop()] != "k":
            raise LookupError("the softmax is not over keys")
        tensor = scores[core.number][0]
        if core.loop:
            tensor = torch.stack([one for one, _ in scores[core.number : core.number + count]], 1)
        letters = core.scores.replace("(", " ").replace(")", " ").split()
        tensor = rearrange(tensor, f"{core.scores} -> {' '.join(letters)}", **_known(core, letters))
        heads = core.head_axes.split()
        extra = [letter for letter in letters if letter not in "bqk" and letter not in heads]
        order = [*(letter for letter in "b" if letter in letters), *heads, "q", "k", *extra]
        tensor = tensor.permute([letters.index(letter) for letter in order])
        first = BATCH if "b" in letters else 1
        return tensor.reshape(first, core.heads, tensor.shape[order.index("q")], tensor.shape[order.index("k")], -1)

    def says_of(self, core: Core, role: str) -> list[str]:
        """List what contradicts the rows of the queries or keys."""
        found = []
        count = 0
        base: dict[Any, Tensor] = {}
        token = core.query_token if role == "query" and core.query_token is not None else TOKEN
        for part in parts_of(getattr(core, role)):
            index = part.index(self.model.get_parameter(part.parameter).shape)
            for head in range(index.shape[0]):
                for place, row in list(enumerate(index[head]))[:: self.step]:
                    feature = (place + 1) % len(row)  # a feature of another head, where queries are the input itself
                    self.silenced = (part, feature, token)
                    key = (part.source, part.takes, feature)
                    if key not in base:
                        base[key] = self._laid_out(core, self.scores())
                    with self.changed(part.parameter, int(row[feature])):
                        after = self._laid_out(core, self.scores())
                    why = self._contradiction(core, role, count + head, base[key], after)
                    if why:
                        found.append(f"{role}, {part.parameter}, head {count + head}: {why}")
            count += index.shape[0]
        self.silenced = None
        return found

    def _contradiction(self, core: Core, role: str, head: int, before: Tensor, after: Tensor) -> str | None:
        size = before.nan_to_num(0.0, 0.0, 0.0).abs()
        largest = size.where(size < MASK, 0.0).max()
        change = (after - before).nan_to_num(0.0, 0.0, 0.0).abs() > NOTICED * largest
        if change.any() and core.spreads:
            change = change & ~_is_scaled(before, after)
        heads = {int(h) for h in change.any(4).any(3).any(2).any(0).nonzero()}
        count = sum(part.index(self.model.get_parameter(part.parameter).shape).shape[0] for part in parts_of(core.key))
        mine = {head} if role == "query" else {h for h in range(core.heads) if core.group(h, count) == head}
        if heads != mine:
            return f"heads {sorted(heads)} notice, not {sorted(mine)}"
        if core.heads_alone:
            return None
        for sequence in change:
            mask = sequence[min(mine)]
            queries, keys = (int(mask.any(dim).sum()) for dim in (1, 0))
            is_query, is_key = queries == 1 and keys > 1, keys == 1 and queries > 1
            is_key = is_key or (keys == 1 and core.query_token is not None) or (core.mixes and min(keys, queries) > 1)
            if parts_of(core.query) == parts_of(core.key):
                is_query = is_key = queries > 1 and keys > 1 and int(mask.sum()) < mask.numel()
            if not (is_query if role == "query" else is_key):
                return f"it changes the scores of {queries} queries and {keys} keys"
        return None

    # Outputs

    def _silencing(self, core: Core, keep: Callable[[int], bool]) -> Callable[[Tensor, int], Tensor]:
        factor = torch.tensor([float(keep(head)) for head in range(core.heads)], dtype=torch.float64)

        def silence(weights: Tensor, number: int) -> Tensor:
            if core.loop:
                return weights * factor[number - core.number]
            letters = core.scores.replace("(", " ").replace(")", " ").split()
            plain, heads = " ".join(letters), core.head_axes.split()
            apart = rearrange(weights, f"{core.scores} -> {plain}", **_known(core, letters))
            shape = [apart.shape[i] if letter in heads else 1 for i, letter in enumerate(letters)]
            full = dict(zip(letters, apart.shape, strict=True))
            return rearrange(apart * factor.reshape(shape), f"{plain} -> {core.scores}", **_within(core, full))

        return silence

    def says_of_outputs(self, core: Core, role: str) -> list[str]:
        """List what contradicts the rows of the values, or the columns of the output projection."""
        found = []
        self.heads.at = range(core.number, core.number + (core.heads if core.loop else core.rounds))
        every = parts_of(getattr(core, role))
        total = sum(part.index(self.model.get_parameter(part.parameter).shape).shape[0] for part in every)
        base: dict[int, tuple[Tensor, Tensor]] = {}
        count = 0
        self._run()  # all heads speak
        self.heads.frozen = list(self.heads.kept)  # values change what is weighed, and not the weights
        try:
            for part in every:
                index = part.index(self.model.get_parameter(part.parameter).shape)
                for head in range(index.shape[0]):
                    number = count + head

                    def is_mine(h: int, number: int = number) -> bool:
                        return (h if role == "output" else core.group(h, total)) == number

                    ways = (self._silencing(core, is_mine), self._silencing(core, lambda h: not is_mine(h)))
                    if number not in base:
                        base[number] = self._each(ways)
                    for row in index[head][:: self.step]:
                        with self.changed(part.parameter, int(row[1 % len(row)])):
                            after = self._each(ways)
                        alone, rest = (_differs(a, b) for a, b in zip(base[number], after))
                        if not alone or (rest and core.heads > 1):
                            why = "is not noticed by it" if not alone else "is noticed by other heads"
                            found.append(f"{role}, {part.parameter}, head {number}: {why}")
                count += index.shape[0]
        finally:
            self.heads.silence = self.heads.frozen = None
        return found

    def _each(self, ways: tuple[Callable[[Tensor, int], Tensor], ...]) -> tuple[Tensor, Tensor]:
        answers = []
        for way in ways:
            self.heads.silence = way
            answers.append(self._run())
        return answers[0], answers[1]


def _known(core: Core, letters: list[str]) -> dict[str, int]:
    sizes = {"b": BATCH, "h": core.heads}
    return {letter: sizes[letter] for letter in letters if letter in sizes}


def _within(core: Core, sizes: dict[str, int]) -> dict[str, int]:
    """Leave the sizes that einops wants: all but one in brackets would do, all are taken."""
    return {letter: sizes[letter] for letter in core.scores.replace("(", " ").replace(")", " ").split()}


def _differs(one: Tensor, other: Tensor) -> bool:
    one, other = one.nan_to_num(), other.nan_to_num()
    return float((one - other).abs().max()) > NOTICED * float(one.abs().max().clamp_min(1e-3))


def _is_scaled(before: Tensor, after: Tensor) -> Tensor:
    """Tell the heads whose scores of a token are the same but for a factor."""
    over = before.nan_to_num(0.0, 0.0, 0.0), after.nan_to_num(0.0, 0.0, 0.0)
    is_scaled = torch.zeros_like(before, dtype=torch.bool)
    for dim in (3, 2):  # the row of a query, the column of a key
        a, b = over
        cross = (a * b).sum(dim, keepdim=True).square()
        square = a.square().sum(dim, keepdim=True) * b.square().sum(dim, keepdim=True)
        is_scaled |= ((square - cross).abs() <= 1e-12 * square.clamp_min(1e-30)).expand_as(is_scaled)
    return is_scaled


def _only_one(tensor: Tensor, letters: list[str], feature: int, token: int = TOKEN) -> Tensor:
    """Leave a feature to one token."""
    tensor = tensor.clone()
    by_token = tensor.movedim(letters.index("c"), -1)
    first = [letter for letter in letters if letter != "c"].index(next(x for x in letters if x in "nmx"))
    by_token = by_token.movedim(first, 0)
    values = torch.zeros_like(by_token[..., feature])
    if "y" in letters:
        values[1, :, 2] = 1.0
    else:
        values[token] = 1.0
    by_token[..., feature] = values
    return tensor


def contradictions(case: Case, step: int = 1) -> list[str]:
    """List everything that contradicts the truth of a case as it is written down, by every `step`-th row of a head."""
    proof = Proof(case, step)
    found = []
    for core in case.cores:
        for role in core.proved:
            found += (proof.says_of if role in ("query", "key") else proof.says_of_outputs)(core, role)
    return found


def softmaxes_over_tokens(case: Case) -> int:
    """Count the softmaxes that run over as many places as there are tokens; widths and counts of heads are others."""
    proof = Proof(case)
    counts = {case.tokens, case.tokens + 2, 16}
    return sum(scores.shape[dim] in counts for scores, dim in proof.scores())
