"""Find heads by behaviour, where no layout knows the module.

No name is read. A copy of the module runs with stubs that answer in place of all of its linear maps, and what reaches
the one that mixes tokens (or comes back, if none does) tells in four steps where the heads are:

1. Answers that are the same for all tokens come through attention as they are, for attention weights add up to one. So
   if each feature answers with a number of its own, every feature of the output says which feature it averages: these
   are the values. Numbers are factors, so that gates behind attention cancel.
2. Values of one at one token and zero elsewhere give the attention weights. Features of the output with the same
   weights belong to one head.
3. The derivative of a head's output at the last token is zero for all features but those of its query at that token,
   and those of its keys and values at all. A feature that matters elsewhere even if its own value is left out of
   account is one of the key.
4. Key features that all heads share beside their own, such as the rotary part of latent attention, are set to zero and
   left apart.

If a projection is fed by another, the heads' weights are products of both. Whatever is found is a claim like any other:
`acts_as_claimed` has to confirm it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdi_callback.attention import projections
from hdi_callback.attention.behaviour.codes import BASE, digits_of, numbers_of
from hdi_callback.attention.behaviour.probe import Answer, MadeUp, Receive, Run, Stub, in_private, run_copy, ways_to_run
from hdi_callback.attention.behaviour.trial import Beside, acts_as_claimed
from hdi_callback.attention.heads import AttentionLayer, HeadProduct, HeadSlice, HeadWeight, Role

_MATTERS = 1e-9  # a derivative, relative to the largest of its head; what does not matter has none at all
_GATES = 1e-6  # the same where all tokens have the same values, which leaves rounding errors
_PROPORTIONAL = 1e-4
_SCALES = (1.0, 0.3, 2.0)  # of the answers: a softmax may be flat or saturated at one of them
_MOST_LINEARS = 16
_MOST_IN_VAIN = 4  # ways to run a module


def find_heads(name: str, module: nn.Module, ways: Sequence[MadeUp] | None = None) -> AttentionLayer | None:
    """Find the heads of a module that may be attention.

    Args:
        name: its dotted path.
        module: the module.
        ways: inputs to try it with; those that are made up by default.

    Returns:
        The layer; `None` if it does not act as attention with heads of its own, or could not be run.
    """
    linears = linear_maps(module)
    if not 2 <= len(linears) <= _MOST_LINEARS:
        return None
    if any(projections.objection(linear) is not None for linear in linears.values()):
        return None
    vain = 0
    for way in ways or ways_to_run(module):
        for seed, scale in enumerate(_SCALES):
            try:
                with in_private(seed), torch.enable_grad():
                    finder = _Finder(name, module, linears, way, scale)
                    layer = finder.find()
            except ValueError:  # what was seen is not clear at this scale
                continue
            except Exception:  # a module that cannot be run so is not known
                break
            if layer is not None and acts_as_claimed(layer, [way], finder.beside):
                return finder.without_what_is_unknown(layer)
        else:
            vain += 1
        if vain == _MOST_IN_VAIN and not ways:  # it runs, and shows no heads
            break
    return None


class _Finder:
    def __init__(
        self,
        name: str,
        module: nn.Module,
        linears: dict[str, nn.Module],
        way: MadeUp,
        scale: float,
    ) -> None:
        self.name, self.module, self.linears, self.way = name, module, linears, way
        self.features = {path: projections.features(linear) for path, linear in linears.items()}
        starts = [0, *itertools.accumulate(given for _, given in self.features.values())]
        self.starts = dict(zip(linears, starts))
        self.count = starts[-1]
        width = self.features[next(iter(linears))][0]
        self.width = width
        self.drawn = {
            path: scale
            * torch.empty(1, way.tokens, given).uniform_(0.5, 1.5)
            * torch.randn(1, way.tokens, given).sign()
            * given**-0.125
            for path, (_, given) in self.features.items()
        }
        self.inner: dict[str, Tensor] = {}  # linear map -> what it is on parts of tokens
        self.receiver: str | None = None
        self.ahead: str | None = None  # a norm or an activation between the heads and the receiver
        self.beside = Beside()
        self.unknown: set[Role] = set()  # what the heads have and no single weight gives
        self.fed_by: dict[str, list[str]] = {}  # linear map -> those whose answers are in what it is given

    def find(self) -> AttentionLayer | None:
        """Go through the four steps."""
        first, stubs = self._run(self.drawn, is_traced=True)
        self.first, self.first_stubs, self.first_answers = first, stubs, dict(self.drawn)
        self._follow()
        for ahead in (None, *self._between()):
            self.ahead = ahead
            values = self._values()
            heads = None if values is None else self._heads(values)
            if values is not None and heads is not None:
                return self._claim(values, heads)
        return None

    def without_what_is_unknown(self, layer: AttentionLayer) -> AttentionLayer:
        """Leave out the roles that no single weight stands for."""
        return replace(layer, slices={role: part for role, part in layer.slices.items() if role not in self.unknown})

    # --- running

    def _run(self, answers: dict[str, Tensor], *, is_traced: bool = False) -> tuple[Run, dict[str, Answer]]:
        stubs = {
            path: Answer(self.features[path][0], answers[path], self.way, partial(self._on_parts, path))
            for path in self.linears
        }
        replaced: dict[nn.Module, Stub] = {self.linears[path]: stub for path, stub in stubs.items()}
        if self.ahead is not None:
            replaced[self.module.get_submodule(self.ahead)] = Receive(1, 1)
        batch = next(iter(answers.values())).shape[0]
        way = replace(self.way, is_normed=True) if is_traced else self.way
        return run_copy(self.module, replaced, way, batch=batch, width=self.width, is_traced=is_traced), stubs

    def _on_parts(self, path: str, x: Tensor) -> Tensor:
        """Do what a map does that is called on parts of tokens: nothing at first, if it can be."""
        taken, given = self.features[path]
        if path not in self.inner:
            if taken == given:
                return x
            self.inner[path] = torch.randn(given, taken)
        return F.linear(x, self.inner[path])

    def _output_of(self, run: Run, stubs: dict[str, Answer]) -> Tensor | None:
        if self.receiver is not None and self.ahead is None:
            received = stubs[self.receiver].received
        else:
            received = self.way.by_token(run.output, next(iter(stubs.values())).answer.shape[0])
        if received is None or not received.isfinite().all():
            return None
        return received

    def _outputs(self, answers: dict[str, Tensor]) -> Tensor:
        output = self._output_of(*self._run(answers))
        if output is None:
            raise ValueError("nothing came of it")
        return output

    # --- 0. what feeds what

    def _follow(self) -> None:
        """Find the linear map whose input at one token depends on other tokens, and what feeds each of the others."""
        leaves = {path: answer.clone().requires_grad_() for path, answer in self.drawn.items()}
        _, stubs = self._run(leaves)
        mixed = []
        for path, stub in stubs.items():
            self.fed_by[path] = []
            if stub.received is None or not stub.received.requires_grad:
                continue
            one = stub.received[0, -1]
            gradients = torch.autograd.grad(
                (one * torch.randn_like(one)).sum(), list(leaves.values()), retain_graph=True, allow_unused=True
            )
            self.fed_by[path] = [
                other for other, gradient in zip(leaves, gradients) if gradient is not None and gradient.any()
            ]
            if any(gradient is not None and gradient[0, :-1].any() for gradient in gradients):
                mixed.append(path)
        if len(mixed) > 1:
            raise ValueError("several maps are given a mix of tokens")
        self.receiver = mixed[0] if mixed else None

    def _between(self) -> Iterator[str]:
        """Name the modules without linear maps through which the heads' outputs go to the receiver, the last first."""
        given = None if self.receiver is None else self.first_stubs[self.receiver].received
        for name, (taken, gave, _) in reversed(self.first.passed.items()):
            before, after = self.way.by_token(taken, 1), self.way.by_token(gave, 1)
            if given is None or before is None or after is None or before.shape != given.shape:
                continue
            if torch.equal(after, given) and not torch.equal(before, after):
                yield name
                given = before

    # --- 1. the values

    def _values(self) -> Tensor | None:
        """For each feature of the output the number of the feature that it averages, ``(features,)``."""
        values = None
        for path, start in self.starts.items():
            count = self.features[path][1]
            digits = digits_of(torch.arange(count))  # the last checks the others, as a gate may look like a digit
            coded = torch.stack([torch.zeros(count), *(1.0 + digit for digit in digits)])
            answers = {
                other: answer[:, :1].abs().expand(len(coded), self.way.tokens, -1)
                for other, answer in self.drawn.items()
            }
            answers[path] = answers[path] * (1 + coded / BASE)[:, None]
            outputs = self._outputs(answers)
            # A gate behind attention cancels, unless it comes from the same map as the values.
            read = (outputs[1:] / outputs[:1] - 1) * BASE
            whole = read.round()
            if values is None:
                values = torch.full((outputs.shape[-1],), -1)
            is_read = ((read - whole).abs() < 0.01) & (whole >= 1) & (whole <= BASE) & (whole == whole[:, :1])
            of_this = is_read.all(0).all(0)
            features, is_right = numbers_of(list(whole[:, 0].long() - 1))
            of_this &= is_right & (features >= 0) & (features < count)
            values[of_this] = start + features[of_this]
        return values if values is not None and int(values.min()) >= 0 else None

    # --- 2. the heads

    def _heads(self, values: Tensor) -> Tensor | None:
        """For each head the features of its output, ``(heads, width)``."""
        answers = {path: answer.repeat(self.way.tokens + 1, 1, 1) for path, answer in self.drawn.items()}
        for path, index in self._split(torch.unique(values)):
            answers[path][:-1, :, index] = 0
            answers[path][-1, :, index] = 1
            for token in range(self.way.tokens):
                answers[path][token, token, index] = 1
        outputs = self._outputs(answers)
        weights = (outputs[:-1] / outputs[-1]).flatten(0, 1).mT  # (features, tokens * tokens), gates cancelled
        left = torch.ones(len(weights), dtype=torch.bool)
        heads = []
        while left.any():
            one = int(left.nonzero()[0])
            members = left & ((weights - weights[one]).abs().amax(-1) < 1e-5)
            if not members.any():
                return None
            heads.append(members.nonzero().flatten())
            left &= ~members
        if len({len(members) for members in heads}) != 1:
            return None
        return torch.stack(heads)

    def _split(self, numbers: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Tell features by their linear map."""
        for path, start in self.starts.items():
            own = numbers[(numbers >= start) & (numbers < start + self.features[path][1])] - start
            if len(own):
                yield path, own

    # --- 3. queries and keys

    def _matter(self, values: Tensor, heads: Tensor) -> tuple[Tensor, Tensor]:
        """Tell for each head which features matter at the last token alone, and which elsewhere."""
        # A loss over half of a head's features does not see the values of the other half: what matters to both is none.
        halves = [heads[:, ::2], heads[:, 1::2]] if heads.shape[1] > 1 else [heads]
        derivatives = [self._derivatives(half, self.drawn) for half in halves]
        here = torch.stack([whole[:, -1] for whole in derivatives]).amin(0) > _MATTERS
        elsewhere = torch.stack([whole[:, :-1].amax(1) for whole in derivatives]).amin(0) > _MATTERS
        # Where all tokens have the same values, queries and keys do not matter; a gate does.
        constant = {path: answer.clone() for path, answer in self.drawn.items()}
        for path, index in self._split(torch.unique(values)):
            constant[path][..., index] = 1
        gates = torch.stack([self._derivatives(half, constant)[:, -1] for half in halves]).amin(0) > _GATES
        return here & ~elsewhere & ~gates, elsewhere

    def _derivatives(self, chosen: Tensor, drawn: dict[str, Tensor]) -> Tensor:
        """Derive some features of each head at the last token by all answers, ``(heads, tokens, features)``."""
        leaves = {path: answer.repeat(len(chosen), 1, 1).requires_grad_() for path, answer in drawn.items()}
        outputs = self._outputs(leaves)[:, -1].gather(1, chosen)
        loss = (outputs * torch.randn_like(outputs)).sum()
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        found = [
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(leaves.values(), gradients)
        ]
        whole = torch.cat(found, -1).abs()
        if not whole.isfinite().all():
            raise ValueError("a derivative is not finite")
        return whole / whole.amax((1, 2), keepdim=True).clamp_min(1e-30)

    # --- the claim

    def _claim(self, values: Tensor, heads: Tensor) -> AttentionLayer | None:
        H, value_dim = heads.shape
        if not torch.equal(heads.flatten(), torch.arange(H * value_dim)):
            return None  # outputs of heads that do not lie side by side
        queries, keys = self._matter(values, heads)
        shared = keys.all(0)
        is_apart = bool(shared.any()) and not torch.equal(keys, shared.expand_as(keys))
        if is_apart:
            for path, index in self._split(shared.nonzero().flatten()):
                self.drawn[path] = self.drawn[path].index_fill(-1, index, 0.0)
            queries, keys = self._matter(values, heads)
            keys &= ~shared
        if queries.any() and not torch.equal(queries.sum(1), keys.sum(1)):
            keys = self._acting_on(queries, keys, values, heads)
        query_rows, key_rows, value_rows = _rows(queries), distinct_rows(_rows(keys)), distinct_rows(values[heads])
        if query_rows is None or key_rows is None or value_rows is None:
            return None
        G, width = key_rows.shape
        if query_rows.shape[1] != width or len(value_rows) != G:
            return None
        slices: dict[Role, HeadWeight] = {}
        knocking = self._on_each_head(values, heads, query_rows, key_rows)
        rows: dict[Role, Tensor] = {"query": query_rows, "key": key_rows, "value": value_rows}
        for role, numbers in rows.items():
            weight = self._weight(numbers)
            if weight is None and role == "query" and len(parts := list(self._split(numbers.flatten()))) == 1:
                # It is made of several features of the input in a way of its own; the keys are known all the same.
                self.unknown.add(role)
                self.beside = replace(self.beside, width=self.width)
                weight = self._slice(parts[0][0], parts[0][1].view(numbers.shape))
            if weight is None:
                return None
            slices[role] = weight
            for path in knocking.get(role, ()):
                if not isinstance(weight, HeadSlice) or len(knocking[role]) > 1:
                    return None
                slices[role] = HeadProduct(self.module, self._slice(path, torch.arange(width)[None]), weight)
        kind = describe_kind(slices) + (", without the part that all heads share" if is_apart else "")
        output = None
        if self.ahead is not None:
            self.beside = replace(self.beside, receiver=self.module.get_submodule(self.ahead))
        elif self.receiver is not None:
            output = self.linears[self.receiver]
            slices["output"] = self._slice(self.receiver, torch.arange(H * value_dim).view(H, value_dim))
        return AttentionLayer(self.name, self.module, H, G, width, value_dim, kind, slices, output)

    def _acting_on(self, queries: Tensor, keys: Tensor, values: Tensor, heads: Tensor) -> Tensor:
        """Leave out what matters to the outputs of heads where no query does, as what is added to the scores."""
        kept = dict(self.drawn)
        for path, index in self._split(queries.any(0).nonzero().flatten()):
            self.drawn[path] = self.drawn[path].index_fill(-1, index, 0.0)
        _, others = self._matter(values, heads)
        self.drawn = kept
        others &= keys
        if others[:, torch.unique(values)].any():
            raise ValueError("values act in another way than as averages")
        claimed = {path for path, _ in self._split((keys & ~others).any(0).nonzero().flatten())}
        claimed |= {path for path, _ in self._split(torch.unique(values))}
        claimed |= {path for path, _ in self._split(queries.any(0).nonzero().flatten())}
        aside = [path for path, _ in self._split(others.any(0).nonzero().flatten()) if path not in claimed]
        self.beside = replace(self.beside, aside=tuple(self.linears[path] for path in aside))
        return keys & ~others

    def _on_each_head(self, values: Tensor, heads: Tensor, queries: Tensor, keys: Tensor) -> dict[Role, list[str]]:
        """Find maps that are called on each head by itself, and for which role; so far they were the identity."""
        found: dict[Role, list[str]] = {}
        width = queries.shape[1]
        for path in [path for path, stub in self.first_stubs.items() if stub.was_inner]:
            given = self.features[path][1]
            if (given, given) != self.features[path] or given != width or given < 3:
                self._require_no_part(path, values, heads)
                continue
            roles: set[Role] = set()
            # It turns the features of a head by one place. Whose features then meet which tells where it stands.
            self.inner[path] = torch.eye(given).roll(1, 0)
            turned = self._values()
            if turned is None:
                raise ValueError("a map on parts of tokens does not turn the values of a head")
            if not torch.equal(turned, values):
                roles.add("value")
            met = self._met(values, heads, queries, keys)
            self.inner[path] = torch.randn(given, given)
            if self._met(values, heads, queries, keys) != [0]:
                shifted: dict[int, tuple[Role, ...]] = {0: ("query", "key"), 1: ("query",), width - 1: ("key",)}
                roles.update(shifted[met[0]])
            del self.inner[path]
            for role in roles:
                found.setdefault(role, []).append(path)
        return found

    def _require_no_part(self, path: str, values: Tensor, heads: Tensor) -> None:
        """Raise an error if it matters to the heads what a map is, as it does not where it is called on positions."""
        before = self._matter(values, heads)
        kept = self.inner.pop(path, None)
        taken, given = self.features[path]
        self.inner[path] = torch.randn(given, taken)
        after, turned = self._matter(values, heads), self._values()
        del self.inner[path]
        if kept is not None:
            self.inner[path] = kept
        if turned is None or not torch.equal(turned, values) or not all(map(torch.equal, before, after)):
            raise ValueError("a map of another width is called on parts of tokens")

    def _met(self, values: Tensor, heads: Tensor, queries: Tensor, keys: Tensor) -> list[int]:
        """Give the places of the key features that meet the first query feature of a head and no other."""
        kept = dict(self.drawn)
        for path, index in self._split(queries[:, 0]):
            self.drawn[path] = self.drawn[path].index_fill(-1, index, 0.0)
        _, left = self._matter(values, heads)
        self.drawn = kept
        gone: list[int] = (~left[0][keys[0]]).nonzero().flatten().tolist()
        return gone

    def _weight(self, numbers: Tensor) -> HeadWeight | None:
        """Describe where rows of heads, ``(heads, width)``, lie."""
        parts = list(self._split(numbers.flatten()))
        if len(parts) != 1:
            return None
        ((path, index),) = parts
        outer = self._slice(path, index.view(numbers.shape))
        if not self.fed_by[path]:
            return outer
        # It is fed by another linear map: as it is, or through a norm that can be written as a gain.
        received = self.first_stubs[path].received
        assert received is not None
        for name, taken, gain_offset in _sources(received, self.first, self.way):
            for other in self.fed_by[path]:
                start = place_in(self.first_answers[other], taken)
                if start is not None:
                    inner = self._slice(other, start + torch.arange(taken.shape[-1])[None])
                    return HeadProduct(self.module, outer, inner, name, gain_offset)
        return None

    def _slice(self, path: str, index: Tensor) -> HeadSlice:
        return fit_slice(self.module, f"{path}.weight", index, projections.is_transposed(self.linears[path]))


def fit_slice(module: nn.Module, parameter: str, index: Tensor, is_transposed: bool) -> HeadSlice:
    """Describe the features of heads within a linear map by their strides.

    Args:
        module: the module that the parameter starts from.
        parameter: dotted path of the parameter.
        index: the features of each head, ``(heads, width)``.
        is_transposed: see `HeadSlice`.

    Returns:
        The slice whose `HeadSlice.index` is that index.

    Raises:
        ValueError: if they lie in no regular order.
    """
    heads, width = index.shape
    start, step = int(index[0, 0]), int(index[0, 1] - index[0, 0]) if width > 1 else 1
    first = index[:, 0].tolist()
    for block in (block for block in range(heads, 0, -1) if heads % block == 0):
        stride = first[1] - first[0] if block > 1 else width * step
        block_stride = first[block] - first[0] if block < heads else 0
        found = HeadSlice(
            module,
            parameter,
            heads,
            width,
            start,
            is_transposed,
            None if stride == width * step else stride,
            step,
            None if block == heads else block,
            block_stride,
        )
        if torch.equal(found.index(), index):
            return found
    raise ValueError("the features of the heads lie in no regular order")


def linear_maps(module: nn.Module, is_map: Callable[[nn.Module], bool] = projections.is_linear) -> dict[str, nn.Module]:
    """Give the linear maps within a module by their paths, adapters in place of what they hold.

    Args:
        module: the module.
        is_map: tells what counts as a linear map.

    Returns:
        Path within the module -> linear map, in the module's order.
    """
    found: dict[str, nn.Module] = {}
    for path, part in module.named_modules():
        if is_map(part) and not any(path.startswith(f"{other}.") for other in found):
            found[path] = part
    return found


def _rows(chosen: Tensor) -> Tensor | None:
    """Turn a mask ``(heads, features)`` into features of heads, ``(heads, width)``; `None` if widths differ."""
    widths = set(chosen.sum(1).tolist())
    if len(widths) != 1 or 0 in widths:
        return None
    return chosen.nonzero()[:, 1].view(len(chosen), -1)


def distinct_rows(rows: Tensor | None) -> Tensor | None:
    """Leave out repetitions of rows.

    Args:
        rows: ``(heads, width)``, features of heads.

    Returns:
        ``(key heads, width)``; `None` if repetitions are not as many for each and side by side.
    """
    if rows is None:
        return None
    distinct: Tensor = torch.unique_consecutive(rows, dim=0)
    times, left = divmod(len(rows), len(distinct))
    if left or not torch.equal(distinct.repeat_interleave(times, 0), rows):
        return None
    return distinct


def describe_kind(slices: Mapping[Role, HeadWeight]) -> str:
    """Say how weights that were found by behaviour are laid out.

    Args:
        slices: role -> where its weight lies.

    Returns:
        Readable words.
    """
    outer = [part.outer if isinstance(part, HeadProduct) else part for part in slices.values()]
    if any(isinstance(part, HeadProduct) for part in slices.values()):
        return "latent, found by behaviour"
    plain = [part for part in outer if isinstance(part, HeadSlice)]
    order = ", interleaved" if any(part.stride is not None or part.block is not None for part in plain) else ""
    shape = "separate" if len({part.parameter for part in outer}) == len(outer) else "fused"
    return f"{shape}{order}, found by behaviour"


def _sources(received: Tensor, run: Run, way: MadeUp) -> Iterator[tuple[str, Tensor, float]]:
    """What a tensor may have been before a norm: the norm's gain, what it was given, and what is added to the gain."""
    yield "", received, 0.0
    for name, (given, gave, part) in run.passed.items():
        taken, output = way.by_token(given, 1), way.by_token(gave, 1)
        if taken is None or output is None or output.shape != received.shape or taken.shape != received.shape:
            continue
        weight = getattr(part, "weight", None)
        gains = [("", torch.ones(()), 0.0)]
        if isinstance(weight, Tensor) and weight.shape == taken.shape[-1:]:
            gains = [(f"{name}.weight", weight, 0.0), (f"{name}.weight", weight + 1, 1.0)]
        for path, gain, offset in gains:
            if _are_proportional(received, taken * gain):  # it is a norm and nothing else, and perhaps a scale
                yield path, taken, offset


def place_in(answer: Tensor, piece: Tensor) -> int | None:
    """Find where in an answer a piece of its features stands, as it is or with one factor for each token.

    Args:
        answer: ``(batch, tokens, features)``.
        piece: ``(batch, tokens, width)``.

    Returns:
        The first of those features; `None` if it is no piece of the answer.
    """
    width = piece.shape[-1]
    if answer.shape[:-1] != piece.shape[:-1] or width > answer.shape[-1] or width < 2:
        return None
    pieces = answer[0, 0].unfold(0, width, 1)  # (places, width)
    off = (pieces * piece[0, 0, :1] - pieces[:, :1] * piece[0, 0]).abs().amax(-1)
    for start in (off < _PROPORTIONAL * pieces.abs().amax(-1) * piece[0, 0].abs().max()).nonzero().flatten().tolist():
        if _are_proportional(piece, answer[..., start : start + width]):
            return int(start)
    return None


def _are_proportional(one: Tensor, other: Tensor) -> bool:
    """Tell whether there is a factor for each token that makes one tensor of the other."""
    factor = one / other
    return bool(((factor - factor[..., :1]).abs() < _PROPORTIONAL * factor[..., :1].abs()).all())
