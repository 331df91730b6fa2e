"""A trial forward of a copy: what the claimed heads are is seen in what depends on what, not guessed.

Neither names nor row counts tell whether a fused matrix holds all queries, then all keys, then all values, whether two
of them are swapped, or whether heads are interleaved or mixed later on. So a copy of the module runs once, with stubs
that answer in place of its projections. Their answers are random and differ, from one element of the batch to the next,
in some heads of one role. Attention with the claimed heads, whatever its kernel, mask, scale or position embedding, is
known by five properties of what reaches the output projection:

- another query at one token changes the output of its head at that token, and nothing else;
- another key at one token changes the outputs of its heads at other tokens, and no other head's;
- twice the values double the outputs of their heads exactly, and change no other head's;
- all features of a key act together, as one score: so a claimed head is not two whose weights are mixed;
- values of one at one token and zero elsewhere, against values of one at all, give the attention weights: none is
  negative, and all features of a head have the same. So a claimed head is not two, side by side or one subtracted from
  the other. Gates behind attention cancel.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from hdi_callback.attention import projections
from hdi_callback.attention.behaviour.probe import Answer, MadeUp, Receive, Stub, in_private, run_copy, ways_to_run
from hdi_callback.attention.heads import AttentionLayer, HeadSlice, Role

_SEEDS = 3  # a draw may saturate a softmax, and then nothing changes; a claim that is wrong never passes
_HEADS_TRIED = 16  # for that all features of a key act together
_MATTERS = 1e-3  # the least of a key's features, relative to the largest
_CHANGED, _SAME = 1e-4, 1e-5  # relative to the largest output


@dataclass(frozen=True)
class Beside:
    """What is known of a module beside the heads that are claimed.

    Attributes:
        receiver: the module that is given the heads' outputs, where that is not the output projection.
        aside: linear maps that answer with the same features whatever is changed, as those do that only add to the
            scores. Who names them has seen that they do nothing else.
        width: features of the module's tokens, where that is not what the queries are made of.
    """

    receiver: nn.Module | None = None
    aside: tuple[nn.Module, ...] = ()
    width: int | None = None


_NOTHING = Beside()


def acts_as_claimed(
    layer: AttentionLayer, ways: Sequence[MadeUp] | None = None, beside: Beside = _NOTHING
) -> bool | None:
    """Tell whether a module really computes attention with the heads that a layout claims.

    Args:
        layer: the claim; its output projection, if it has one, is a linear map within the module. Where it has no
            query, what the module's own parts give in a copy stands for it.
        ways: inputs to try it with; those that are made up by default.
        beside: what is known of the module beside the claim.

    Returns:
        True or False where the trial could be made; `None` where it could not, such as when the module needs inputs
        that nobody can make up, cannot be copied, or uses its projections without calling them.
    """
    is_seen_otherwise = is_contradicted = has_run = False
    for way in ways_to_run(layer.module, layer.head_dim, with_groups=True) if ways is None else ways:
        if way.shape == "in groups" and is_contradicted:
            break
        for seed in range(_SEEDS):
            look = _look(layer, way, seed, beside)
            if look is None:
                break
            if look is True and (acts := _attends_by_one_score(layer, way, seed, beside)) is not False:
                if acts:
                    return True
                break
            has_run = True
            # Where batch and length are swapped, what is seen says nothing of the heads.
            if not is_seen_otherwise and not _keeps_sequences_apart(layer, way, seed, beside):
                break
            is_seen_otherwise, is_contradicted = True, is_contradicted or look != ""
    # Sequences that are mixed in every way that runs are no evidence for the claim either. Without an output projection
    # what comes back may be anything.
    return False if has_run and layer.output_projection is not None else None


def _attends_by_one_score(layer: AttentionLayer, way: MadeUp, seed: int, beside: Beside) -> bool | None:
    """Tell whether all features of a key act together, as one score; `None` if it could not be tried."""
    # Then the derivatives of any two functions of a head's output by its key at one token have the same direction. They
    # have not where a head is two, whose weights are added or subtracted.
    if layer.value_dim < 2 or layer.head_dim < 2:
        return True
    key, linear = _outer(layer, "key"), _linear(layer, "key")
    H, G = layer.num_heads, layer.num_key_heads
    heads = torch.linspace(0, H - 1, min(H, _HEADS_TRIED)).long()  # all are computed in one way
    try:
        with in_private(seed), torch.enable_grad():
            changes = _Changes(layer, way.tokens, beside)
            changes.batch = len(heads)
            changes.answers = {one: answer[:1].repeat(len(heads), 1, 1) for one, answer in changes.answers.items()}
            leaf = changes.answers[linear].requires_grad_()
            outputs = _forward(layer, changes, way)
            assert outputs is not None
            own = outputs[torch.arange(len(heads)), -1, heads]  # (heads, d_v): of each element another head
            functions = [(own * torch.randn_like(own)).sum() for _ in range(2)]
            index = key.index().repeat_interleave(H // G, 0)[heads, None].expand(-1, way.tokens, -1)
            one, other = (
                torch.autograd.grad(function, leaf, retain_graph=True)[0].gather(2, index) for function in functions
            )
    except Exception:
        return None
    sizes = one.norm(dim=1)  # (heads, d_k)
    if (sizes < _MATTERS * sizes.amax(1, keepdim=True)).any():
        return False
    values_too = _outer(layer, "value").index() if _linear(layer, "value") is linear else None
    if values_too is not None and set(values_too.flatten().tolist()) & set(key.index().flatten().tolist()):
        return True  # the same features are values as well, whose derivatives have other directions
    sizes = one.norm(dim=-1) * other.norm(dim=-1)
    counts = sizes > 1e-4 * sizes.max()
    cosines = ((one * other).sum(-1) / sizes.clamp_min(1e-30)).abs()
    return bool((cosines[counts] > 1 - 1e-3).all())


def contradiction(layer: AttentionLayer, ways: Sequence[MadeUp]) -> str | None:
    """Say what contradicts the heads that a layout claims.

    Args:
        layer: the claim.
        ways: the inputs to try it with; one of them is right.

    Returns:
        What was seen that cannot be; `None` if the heads were seen, or nothing could be.
    """
    if layer.output_projection is None:
        return None
    shown = None
    for way, seed in itertools.product(ways, range(_SEEDS)):
        look = _look(layer, way, seed, _NOTHING)
        if look is True:
            return None
        if look and shown is None and _keeps_sequences_apart(layer, way, seed, _NOTHING):
            shown = look
    return shown


def _keeps_sequences_apart(layer: AttentionLayer, way: MadeUp, seed: int, beside: Beside) -> bool:
    """Tell whether changes in other sequences leave the first as it is; they do not if batch and length are swapped."""
    outputs = []
    for is_changed in (True, False):
        with in_private(seed), torch.no_grad():
            changes = _Changes(layer, way.tokens, beside)
            if not is_changed:
                changes.answers = {linear: answer[:1].expand_as(answer) for linear, answer in changes.answers.items()}
            found = _forward(layer, changes, way)
            assert found is not None
            outputs.append(found[0])
    return bool((outputs[0] - outputs[1]).abs().max() < _SAME * outputs[0].abs().max())


def _look(layer: AttentionLayer, way: MadeUp, seed: int, beside: Beside) -> Literal[True] | str | None:
    """True if the heads are seen; what contradicts them, empty if they are just not seen; `None` if nothing ran."""
    if way.tokens < 2:  # one token attends to itself alone, whatever the heads are
        return None
    try:
        with in_private(seed), torch.no_grad():
            changes = _Changes(layer, way.tokens, beside)
            outputs = _forward(layer, changes, way)
    except Exception:
        return None
    if outputs is None or not outputs.isfinite().all() or not outputs[0].any():
        return None
    return changes.look_for(outputs)


def _forward(layer: AttentionLayer, changes: _Changes, way: MadeUp) -> Tensor | None:
    """Run a copy with stubs for projections; give what reaches the output projection, ``(batch, length, H, d_v)``."""
    stubs: dict[nn.Module, Stub] = {}
    for linear, answer in changes.answers.items():
        roles = [role for role in layer.slices if _linear(layer, role) is linear]
        taken = _outer(layer, roles[0]).in_features if roles else projections.features(linear)[0]
        stubs[linear] = Answer(taken, answer, way, dim=projections.feature_dim(linear))
    answers = [stubs[linear] for linear in changes.answers if linear not in changes.beside.aside]
    receiver = changes.beside.receiver or layer.output_projection
    if receiver is not None:
        stubs[receiver] = Receive(layer.num_heads * layer.value_dim, 1, projections.feature_dim(receiver))
    width = changes.beside.width or layer.slices["query" if "query" in layer.slices else "key"].in_features
    run = run_copy(layer.module, stubs, way, batch=changes.batch, width=width)
    if not all(isinstance(stub, Answer) and stub.was_called for stub in answers):
        return None
    outputs = way.by_token(run.output, changes.batch)
    if outputs is None:
        return None
    by_head: Tensor = outputs.reshape(*outputs.shape[:2], layer.num_heads, layer.value_dim)
    return by_head


class _Changes:
    """The projections' answers: in element 0 of the batch as drawn, in each other one with some heads changed."""

    def __init__(self, layer: AttentionLayer, tokens: int, beside: Beside) -> None:
        self.layer, self.tokens, self.beside = layer, tokens, beside
        H, G = layer.num_heads, layer.num_key_heads
        # what is changed, and in which of its heads
        self.cases: list[tuple[Literal["query", "key", "value", "ones", "weights"], Tensor]] = [
            *(("query", heads) for heads in _subsets(H) if "query" in layer.slices),
            *(("key", heads) for heads in _subsets(G)),
            # Where values are the keys, twice the values would be twice the keys.
            *(("value", heads) for heads in _subsets(G) if _outer(layer, "key") != _outer(layer, "value")),
            ("ones", torch.ones(G, dtype=torch.bool)),
            ("weights", torch.ones(G, dtype=torch.bool)),
        ]
        self.batch = 1 + len(self.cases)
        self.token = tokens // 2
        self.answers: dict[nn.Module, Tensor] = {}
        roles: tuple[Role, ...] = ("query", "key", "value")
        for role in roles:
            if role not in layer.slices:
                continue
            linear = _linear(layer, role)
            features = _outer(layer, role).features[1]
            if linear not in self.answers:
                # Away from zero, as a query of nearly zero hides its keys.
                drawn = torch.empty(1, tokens, features).uniform_(0.5, 1.5) * torch.randn(1, tokens, features).sign()
                self.answers[linear] = drawn.repeat(self.batch, 1, 1)
            if role != "value":
                # So that products of queries and keys are of order one both with and without a scale.
                part = _outer(layer, role)
                self.answers[linear][..., part.index()] *= part.width**-0.125
        for linear in beside.aside:
            drawn = torch.randn(1, tokens, projections.features(linear)[1])
            self.answers.setdefault(linear, drawn.expand(self.batch, -1, -1))
        for element, (case, heads) in enumerate(self.cases, 1):
            changed: Role = "query" if case == "query" else "key" if case == "key" else "value"
            rows = _outer(layer, changed).index()
            answer = self.answers[_linear(layer, changed)][element]
            if case == "value":
                answer[:, rows[heads].flatten()] *= 2
            elif case == "ones":
                answer[:, rows.flatten()] = 1
            elif case == "weights":
                answer[:, rows.flatten()] = 0
                answer[self.token, rows.flatten()] = 1
            else:
                answer[self.token, rows[heads].flatten()] *= -1

    def look_for(self, outputs: Tensor) -> Literal[True] | str:
        """Compare outputs ``(batch, length, H, d_v)`` with what the changes should have done."""
        plain, ones = outputs[0], outputs[1 + [case for case, _ in self.cases].index("ones")]
        scale = plain.abs().max()
        elsewhere = torch.arange(self.tokens) != self.token
        is_missed = False
        for output, (case, changed) in zip(outputs[1:], self.cases):
            heads = changed.repeat_interleave(self.layer.num_heads // len(changed))
            change = (output - plain).abs().amax(-1) / scale  # (length, H)
            others = change[:, ~heads]
            if case == "query":
                is_missed |= not change[self.token, heads].min() > _CHANGED
                others = torch.cat([others.flatten(), change[elsewhere].flatten()])  # and no other token's
            elif case == "key":
                is_missed |= not change[elsewhere][:, heads].amax(0).min() > _CHANGED
            elif case == "value":
                is_missed |= not (output - 2 * plain)[:, heads].abs().max() < _SAME * scale
            elif case == "weights":
                weights = output / ones  # a gate behind attention cancels
                is_missed |= not (weights.min() > -_SAME and (weights - weights[..., :1]).abs().max() < _SAME)
            if case in ("query", "key", "value") and (others > _SAME).any():
                seen = (change > _SAME).any(0).nonzero().flatten().tolist()
                return (
                    f"another {case} in the heads {changed.nonzero().flatten().tolist()} alone changes the outputs of "
                    f"the heads {seen}"
                )
        return "" if is_missed else True


def _subsets(heads: int) -> list[Tensor]:
    """Make masks of heads by the bits of their numbers and the complements, so that any two heads are told apart."""
    numbers = torch.arange(heads)
    bits = [(numbers >> bit) % 2 == 1 for bit in range(max(1, (heads - 1).bit_length()))]
    return [mask for bit in bits for mask in (bit, ~bit) if mask.any()]


def _outer(layer: AttentionLayer, role: Role) -> HeadSlice:
    """The last map on the way to a role that is called on whole tokens."""
    return layer.slices[role].by_token


def _linear(layer: AttentionLayer, role: Role) -> nn.Module:
    part = _outer(layer, role)
    return part.module.get_submodule(part.parameter.rpartition(".")[0])
