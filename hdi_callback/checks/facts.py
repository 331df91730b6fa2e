"""Facts about each attention of a forward: which rows make its heads, how scores are made, where outputs go.

A fact that cannot be established is `None`, or missing. Nothing here judges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hdi_callback.attention.cores import Core, core_of
from hdi_callback.attention.find import place_of
from hdi_callback.attention.heads import IN, Claim, Map
from hdi_callback.attention.labels import Label, Labels, Unreadable
from hdi_callback.attention.planes import small, unique_rows
from hdi_callback.attention.tape import DATA, SHAPED_LIKE, Cell, Step
from hdi_callback.checks.positions import angles_of, pairs_of
from hdi_callback.checks.scores import (
    Change,
    Link,
    axes_of,
    changes_of,
    changes_of_fused,
    dropout_behind,
    few,
    hidden_by,
    is_renormalised,
    scale_of,
    way,
)

__all__ = ["Facts", "HeadRows", "facts_of"]


@dataclass(frozen=True, eq=False)
class HeadRows:
    """Rows (of an output: columns) of each head in one parameter.

    Attributes:
        name: of the parameter, or of the first, if each head has one of its own.
        rows: ``(heads, width)``, their numbers.
        total: how many rows the parameter has.
        used: how many of them make queries, keys or values of this attention.
        unread: rows whose products are computed, and taken by nothing.
        is_frozen: whether the parameter is not trained.
    """

    name: str
    rows: Tensor
    total: int
    used: int
    unread: tuple[int, ...] = ()
    is_frozen: bool = False

    @property
    def short(self) -> str:
        """The name of its module, as code calls it: ``q_proj``."""
        return _short(self.name)

    @property
    def order(self) -> str:
        """How heads lie in the parameter: ``"head by head"``, ``"interleaved"``, or ``""``."""
        rows = self.rows.sort(-1).values
        rows = rows[rows[:, 0].argsort()].unique_consecutive(dim=0)  # heads may share keys
        steps = rows[:, 1:] - rows[:, :-1]
        if rows.shape[1] < 2 or len(steps.unique()) > 1:
            return ""
        return "head by head" if bool((rows[1:, 0] > rows[:-1, -1]).all()) else "interleaved"


@dataclass(frozen=True, eq=False)
class Facts:
    """What one attention does.

    Attributes:
        path: of its layer.
        line: file and line of the forward where the softmax runs, if that is known.
        reason: why its heads cannot be told, if they cannot.
        is_training: whether its module is in training mode.
        matrices: score matrices that are computed.
        heads: how many there are; 0 if that is not known.
        key_of: of each head, the number of its keys among the different ones.
        width: features of a query in its head.
        features: features that its maps take.
        queries: tokens that ask, in each matrix.
        keys: tokens that are asked.
        rows: role -> the rows of each map that is summed, one as a rule; of ``"output"`` columns.
        flags: what else was seen on the way from maps to scores.
        equal: pairs of heads whose queries, and keys, have equal rows.
        scale: what products of queries and keys are multiplied with; `None` if that is not known.
        changes: what is done to scores before the softmax.
        hidden: which keys are hidden, ``(..., queries, keys)``; `None` if that is not known.
        behind: what is done to weights behind the softmax.
        is_renormalised: whether weights are divided by their sums behind the softmax.
        softmaxes: how many run one after the other.
        dropout: probability behind the softmax; `None` if that is not known.
        pairs: role -> pairs of places in a head that are mixed, as rotary positions do.
        angles: role -> cosines ``(heads, tokens, width)`` with which features are multiplied; NaN where not known.
        split: role -> its map, and the tokens that the first head's rows are made of, where heads are cut without a
            transpose.
        merged: heads and tokens ``(head, token)`` in the first row that the output projection takes, where it has
            several tokens of a head.
        cut: heads whose output nothing takes.
        padding: name of a mask -> its values ``(batch, tokens)``, as the forwards around were given it.
        given: shape of the first tensor that the model is given.
    """

    path: str
    line: str
    reason: str
    is_training: bool
    matrices: int = 0
    heads: int = 0
    key_of: tuple[int, ...] = ()
    width: int = 0
    features: int = 0
    queries: int = 0
    keys: int = 0
    rows: Mapping[str, tuple[HeadRows, ...]] = field(default_factory=dict)
    flags: frozenset[str] = frozenset()
    equal: tuple[tuple[int, int], ...] = ()
    scale: float | None = None
    changes: tuple[Change, ...] = ()
    hidden: Tensor | None = None
    behind: tuple[Change, ...] = ()
    is_renormalised: bool = False
    softmaxes: int = 1
    dropout: float | None = None
    pairs: Mapping[str, frozenset[tuple[int, int]]] = field(default_factory=dict)
    angles: Mapping[str, Tensor] = field(default_factory=dict)
    split: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    merged: tuple[tuple[int, int], ...] = ()
    cut: tuple[int, ...] = ()
    padding: Mapping[str, Tensor] = field(default_factory=dict)
    given: tuple[int, ...] = ()

    @property
    def sees(self) -> Tensor | None:
        """Which keys each query sees, ``(n, tokens, tokens)``, if it asks as many as there are; `None` otherwise."""
        count = min(self.queries, 64)
        if self.hidden is None or self.queries != self.keys:
            return None
        shape = (*self.hidden.shape[:-2], count, count)
        try:
            return ~self.hidden.expand(shape).reshape(-1, count, count)
        except RuntimeError:
            return None

    @property
    def is_causal(self) -> bool | None:
        """Whether each token sees itself, and none behind it; `None` if that is not known, or does not apply."""
        sees = self.sees
        if sees is None or self.queries < 2:
            return None
        return not bool(sees.triu(1).any()) and bool(sees.diagonal(dim1=-2, dim2=-1).any())

    @property
    def is_usual_scale(self) -> bool:
        """Whether scores are scaled by 1 / sqrt(width)."""
        return bool(self.scale and self.width) and math.isclose(self.scale or 0, self.width**-0.5, rel_tol=0.01)

    def name_of(self, role: str) -> str:
        """The module that makes a role, as code calls it."""
        return self.rows[role][0].short if self.rows.get(role) else f"the {role} map"


def facts_of(labels: Labels, claims: list[Claim], refused: list[tuple[Step, str]]) -> list[Facts]:
    """Collect facts about each attention that was read, or whose softmax was met, in the order of the forward."""
    given = _given(labels)
    found: list[tuple[int, Facts]] = []
    every: list[tuple[Step, Claim | str]] = [*((claim.core.step, claim) for claim in claims), *refused]
    for step, what in every:
        try:
            facts = _of_refused(labels, step, what, given) if isinstance(what, str) else _of_claim(labels, what, given)
        except Exception as error:  # one attention that is not understood leaves the others
            reason = f"its facts could not be collected ({type(error).__name__}: {error})"
            facts = Facts(step.path or "", _line(step), reason, is_training=True)
        found.append((step.number, facts))
    return [facts for _, facts in sorted(found, key=lambda one: one[0])]


def _of_claim(labels: Labels, claim: Claim, given: tuple[int, ...]) -> Facts:
    core, model = claim.core, labels.tape.model
    rows = {role: tuple(_rows(labels, one, claim) for one in claim.maps[role]) for role in IN if role in claim.maps}
    if claim.outputs:
        rows["output"] = tuple(_rows(labels, one, claim) for _, one in claim.outputs)
    keys = [tuple(row) for row in rows["key"][0].rows.tolist()] if "key" in rows else []
    order = list(dict.fromkeys(keys))
    first = claim.maps.get("query") or claim.maps.get("key") or []
    starts = {role: claim.maps[role][0].starts for role in ("query", "key") if role in claim.maps}
    facts = _of_core(labels, core, given)
    is_sum = bool({"query: sum", "key: sum"} & claim.flags)  # of which each part may have a scale of its own
    return replace(
        facts,
        scale=None if is_sum and not facts.is_usual_scale else facts.scale,
        path=place_of(model, claim, claim.maps),
        heads=claim.heads,
        key_of=tuple(order.index(one) for one in keys),
        features=first[0].count if first else 0,
        rows=rows,
        flags=frozenset(claim.flags),
        equal=_equal_heads(labels, claim),
        angles={role: one for role in starts if (one := angles_of(labels, core, role, starts[role])) is not None},
        merged=_merged(labels, claim),
        cut=_cut(labels, claim),
    )


def _of_refused(labels: Labels, step: Step, reason: str, given: tuple[int, ...]) -> Facts:
    try:
        core = core_of(labels, step)
    except Unreadable:
        core = None
    if core is not None:
        return replace(_of_core(labels, core, given), reason=reason)
    is_training = labels.tape.model.get_submodule(step.path or "").training
    return Facts(step.path or "", _line(step), reason, is_training, is_renormalised=is_renormalised(step), given=given)


def _of_core(labels: Labels, core: Core, given: tuple[int, ...]) -> Facts:
    """Collect what is known of an attention without its heads."""
    part, step = core.parts[0], core.step
    scores: list[Link] | None = []
    behind: list[Link] | None = []
    axes: tuple[int, int] | None = None
    if part.product is None:
        dropout: float | None = float(step.given("dropout_p", 0.0) or 0.0)
        changes = changes_of_fused(step)
    else:
        axes = axes_of(core)
        scores = way(step.taken[0].cell, lambda one: one is core.score_step)
        behind = way(part.product.first.cell, lambda one: one is step)
        dropout = None if behind is None else dropout_behind(behind)
        changes = [Change("not followed", None)] if scores is None else changes_of(scores, axes)
    softmaxes = 1 + sum(link.step.op in {"_softmax", "_safe_softmax"} for link in (*(scores or ()), *(behind or ())))
    named = {role: getattr(part, role) for role in IN}
    return Facts(
        path=step.path or "",
        reason="",
        line=_line(step),
        is_training=labels.tape.model.get_submodule(step.path or "").training,
        matrices=len(part.query.features),
        width=part.query.features.shape[-1],
        queries=part.query.features.shape[1],
        keys=part.key.features.shape[1],
        scale=None if scores is None else scale_of(labels, core, scores),
        changes=tuple(changes),
        hidden=hidden_by(changes) if softmaxes == 1 else None,  # what one hides the next one shows
        behind=tuple(changes_of(behind or [], axes)),
        is_renormalised=is_renormalised(step),
        softmaxes=softmaxes,
        dropout=dropout,
        pairs={role: pairs_of(labels, label) for role, label in named.items()},
        split={role: found for role, label in named.items() if (found := _split(labels, label, given))},
        padding={name: one.cpu() for name, one in step.padding.items()},
        given=given,
    )


def _line(step: Step) -> str:
    """File and line, without folders; nothing of torch's own."""
    path = step.line.replace("\\", "/")
    return "" if "/torch/nn/" in path else path.rpartition("/")[2]


def _given(labels: Labels) -> tuple[int, ...]:
    for step in labels.tape.steps:
        for view in step.taken:
            if view.cell.kind == DATA and view.cell.step is None and len(view.shape) > 1:
                return view.shape
    return ()


def _short(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


# rows of parameters


def _rows(labels: Labels, one: Map, claim: Claim) -> HeadRows:
    first = torch.tensor([labels.tape.first[owner] for owner in one.owners])[:, None]
    name = labels.tape.names[one.owners[0]]
    parameter = labels.tape.model.get_parameter(name)
    total = parameter.numel() // max(1, one.count)
    maps = [other for role in IN for other in claim.maps.get(role, []) if set(other.owners) == {one.owners[0]}]
    used = len(torch.cat([other.starts.flatten() for other in maps]).unique()) if maps else total
    unread = _unread(labels, one) if used < total else ()
    return HeadRows(name, _numbers(one.starts - first, one), total, used, unread, not parameter.requires_grad)


def _numbers(offset: Tensor, one: Map) -> Tensor:
    """Number rows by where in a parameter they start."""
    if one.stride == 1:
        return offset // one.count
    return offset // (one.count * one.stride) * one.stride + offset % one.stride


def _unread(labels: Labels, one: Map) -> tuple[int, ...]:
    """List the rows of a parameter whose products nothing takes."""
    unread: set[int] | None = None
    for number in labels.products_of.get(one.owners[0], {}):
        made = labels.tape.steps[number].made[0]
        label = labels.may_read(made) if made is not None else None
        taken = _taken(labels, made.cell) if made is not None else None
        if label is None or taken is None:
            return ()
        mine = {member for each in few(label.features) for member in labels.members(each)} - taken
        unread = mine if unread is None else unread & mine
    offset = torch.tensor(sorted(unread or ())) - labels.tape.first[one.owners[0]]
    return tuple(_numbers(offset, one).tolist())


def _taken(labels: Labels, cell: Cell, depth: int = 4) -> set[int] | None:
    """List the features of a cell that any operation takes; `None` if that is not known, or if nothing takes it."""
    found: set[int] = set()
    for user in cell.users:
        if user.op in SHAPED_LIKE:
            continue
        if any(out is None or out.cell.before is cell for out in user.made):
            return None
        for view in user.taken:
            label = labels.may_read(view) if view.cell is cell else None
            if view.cell is cell and label is None:
                return None
            found |= {member for one in few(label.features) for member in labels.members(one)} if label else set()
    if len(cell.users) == 1 and (user := cell.users[0]).is_pointwise and depth:  # a bias, say, and then a slice
        out = user.made[0]
        return _taken(labels, out.cell, depth - 1) if out is not None else None
    return found or None


def _equal_heads(labels: Labels, claim: Claim) -> tuple[tuple[int, int], ...]:
    """Find heads that have equal rows of queries, and of keys."""
    tape, parts = labels.tape, []
    for role in ("query", "key"):
        maps = claim.maps.get(role, [])
        if len(maps) != 1 or tape.local or len(set(maps[0].owners)) > 1:
            return ()
        one = maps[0]
        parameter = tape.model.get_parameter(tape.names[one.owners[0]]).detach()
        if parameter.is_meta or not parameter.is_floating_point():
            return ()
        flat = parameter.as_strided((parameter.untyped_storage().nbytes() // parameter.element_size(),), (1,), 0)
        at = one.starts - tape.first[one.owners[0]]
        parts.append(flat[(at[..., None] + torch.arange(one.count) * one.stride).to(flat.device)].flatten(1))
    sums = [part.double().sum(1) for part in parts]
    alike = (sums[0][:, None] == sums[0]) & (sums[1][:, None] == sums[1])
    return tuple(
        (first, second)
        for first, second in alike.triu(1).nonzero().tolist()
        if all(torch.equal(part[first], part[second]) and bool(part[first].any()) for part in parts)
    )


# tokens and heads that lie in the wrong place


def _split(labels: Labels, label: Label, given: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
    """Give map and tokens of the first rows of a role, if memory ``(token, head)`` is read as something else."""
    n, rows, _ = label.features.shape
    if rows < 2 or label.features.stride(1) == 0:
        return None
    _, kinds = unique_rows(label.features.reshape(n * rows, -1))
    tokens, heads = label.tokens[..., 0].reshape(-1), len(kinds.unique())
    if heads < 2 or len(kinds) % heads or bool((tokens <= 0).any()):
        return None
    by_token, numbers = kinds.reshape(-1, heads), tokens.reshape(-1, heads)
    is_cut = bool((by_token == by_token[0]).all()) and bool((numbers == numbers[:, :1]).all())
    in_order = bool((numbers[1:, 0] > numbers[:-1, 0]).all())
    of_a_token = rows == heads and len(given) > 1 and n > given[0]  # more matrices than sequences
    if not is_cut or not in_order or not (of_a_token or n % heads == 0):
        return None
    owner = min(labels.owners(label.features))
    name = _short(labels.tape.names[owner]) if owner < len(labels.tape.names) else "its map"
    return name, tuple((tokens[:rows] - tokens[0]).tolist())


def _merged(labels: Labels, claim: Claim) -> tuple[tuple[int, int], ...]:
    """Give the head and token of each part of the first row of an output projection, if it mixes tokens of a head."""
    source = claim.source
    if source is None or claim.heads < 2 or not claim.numbers or claim.outputs:
        return ()
    queries = claim.numbers[0].shape[1]
    for _, product in claim.takers:
        label = labels.may_read(product.first)
        if label is None or label.features.shape[-1] != claim.heads * claim.width:
            continue
        features, tokens = (plane.reshape(-1, plane.shape[-1])[0] for plane in (label.features, label.tokens))
        if bool((features < source.start).any()) or bool((features >= source.end).any()):
            continue
        parts = list(dict.fromkeys(zip(((features - source.start) // claim.width).tolist(),
                                       ((tokens - 1) % queries).tolist())))  # fmt: skip
        if len(parts) > len({head for head, _ in parts}):
            return tuple(parts)
    return ()


def _cut(labels: Labels, claim: Claim) -> tuple[int, ...]:
    """List heads whose output nothing takes."""
    source, taken = claim.source, set[int]()
    if source is None or claim.outputs:  # a map takes all of them
        return ()
    for part in claim.core.parts:
        made = part.step.made[0]
        found = _taken(labels, made.cell) if made is not None and part.step.number in labels.installed else None
        if found is None:
            return ()
        taken |= {(one - source.start) // claim.width for one in found if source.start <= one < source.end}
    return tuple(sorted(set(range(claim.heads)) - taken)) if taken else ()


def shown_rows(rows: Tensor) -> str:
    """Write numbers of rows as ranges: ``0-767``."""
    numbers = set(small(rows).flatten().tolist())
    starts = sorted(one for one in numbers if one - 1 not in numbers)
    ends = sorted(one for one in numbers if one + 1 not in numbers)
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends)]
    return ", ".join(parts) if len(parts) < 4 else f"{parts[0]}, {parts[1]}, ... {parts[-1]}"
