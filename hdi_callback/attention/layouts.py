"""Heads by the names of projections and by trials, where a traced run decides nothing.

The heads are never guessed. A count comes from the module's own attributes (or its own config), and every shape has to
agree with it. A module with parts that are not known here is refused, for they may change what the heads receive.
A trial forward (`trial.py`) has the last word: what it contradicts is refused, and the order of rows in a fused
projection counts as known only where it is seen there. Where no trial can be made, separate projections are proposed
by names alone, which establishes nothing (`AttentionLayer.evidence`). What is refused here, `finder.py` may find.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from torch import nn

from hdi_callback.attention import projections
from hdi_callback.attention.behaviour.finder import find_heads
from hdi_callback.attention.behaviour.probe import MadeUp, ways_to_run
from hdi_callback.attention.behaviour.received import find_by_scores
from hdi_callback.attention.behaviour.trial import acts_as_claimed
from hdi_callback.attention.conventions import FUSED_NAMES, ROLE_NAMES
from hdi_callback.attention.heads import AttentionLayer, Evidence, HeadSlice, RefusedError, Role, check_layer
from hdi_callback.attention.norms import with_norms
from hdi_callback.attention.projections import is_linear
from hdi_callback.attention.registry import Place


class SeenError(RefusedError):
    """A reason that rests on what was seen, and on no name."""


_MOST_WAYS = 16  # to look at the scores of a module with inputs that are made up


def described_by_names(place: Place) -> AttentionLayer | None:
    """Ask whether names and shapes are those of a module of separate projections, or of one for all.

    Args:
        place: the module and where it stands.

    Returns:
        The layer, its evidence a trial, or names alone where none could be made; `None` if names say nothing.

    Raises:
        RefusedError: if it has the names of attention, and its heads cannot be established.
    """
    for layout in (fused_projection, separate_projections):
        layer = layout(place)
        if layer is not None:
            return check_layer(with_norms(layer))
    return None


def found_by_behaviour(place: Place, ways: Sequence[MadeUp] | None = None) -> AttentionLayer:
    """Find heads that no layout knows by what a copy of the module does.

    Args:
        place: the module and where it stands.
        ways: inputs to try it with; those that are made up by default.

    Returns:
        The layer.

    Raises:
        NoHeadsError: if the module does not act as attention, could not be run, or has a layout of the user's own.
    """
    by_token = None if ways is None else [way for way in ways if not way.is_whole]
    layer = None if by_token == [] else find_heads(place.name, place.module, by_token)
    if layer is None:
        layer = find_by_scores(place.name, place.module, ways or islice(ways_to_run(place.module), _MOST_WAYS))
    layer = replace(with_norms(layer), evidence="trial" if ways is None else "forward")
    if layer.output_projection is not None:
        return layer
    output = _output_projection(place)
    if output is None or output.owner is not place.parent or output.features[0] != layer.num_heads * layer.value_dim:
        return layer
    slices = {**layer.slices, "output": output.slice(layer.num_heads, layer.value_dim)}
    return replace(layer, slices=slices, output_projection=output.module)


# --- one linear map per role

_HEAD_COUNTS = ("num_heads", "n_heads", "num_attention_heads", "n_head", "nhead", "heads", "num_head", "nheads", "n_h")
_KEY_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads", "num_key_heads")
_HEAD_WIDTHS = ("head_dim", "attention_head_size", "head_size", "dim_head", "d_head", "d_k", "key_value_proj_dim")

# Parts that leave the key of each head where its weight puts it, up to an invertible map within the head.
_HARMLESS = (nn.Dropout, nn.Identity, nn.Softmax)
_HARMLESS_NAMES = re.compile(
    r"rotary|rope|bias|dropout|^(q|k|query|key)_?(norm|layer_?norm)$|^norm_?[qk]$|scale|sink", re.I
)


def separate_projections(place: Place) -> AttentionLayer | None:
    """One linear map for the queries, one for the keys, one for the values, under any of the usual names."""
    inputs = {role: _child(place, ROLE_NAMES[role]) for role in ("query", "key", "value")}
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    if query is None or key is None or value is None:
        return None
    output = _output_projection(place)
    _refuse_unknown_parts(place, [query, key, value, output])
    doubts: list[str] = []
    H = _head_count(place, doubts)
    width = _even(place, "query", query.features[1], H)
    _agree(place, width, H)
    G = _key_head_count(place, H, width, key.features[1], doubts)
    value_dim = _even(place, "value", value.features[1], G)
    slices: dict[Role, HeadSlice] = {
        "query": query.slice(H, width),
        "key": key.slice(G, width),
        "value": value.slice(G, value_dim),
    }
    layer = _with_output(place, slices, output, H, G, width, value_dim, _kind("separate", [query, key, value]))
    is_as_claimed = acts_as_claimed(layer)  # names and shapes carry the claim where no trial can be made
    if is_as_claimed is False:
        raise SeenError("a trial forward shows that its heads are not the blocks of rows that its shapes suggest")
    if doubts and is_as_claimed is None:
        raise RefusedError(f"{doubts[0]}, and which of them holds could not be seen in a trial forward")
    evidence: Evidence = "names" if is_as_claimed is None else "trial"
    return replace(layer, evidence=evidence)


# --- one linear map for all


def fused_projection(place: Place) -> AttentionLayer | None:
    """One linear map whose rows are all queries, then all keys, then all values."""
    module = place.module
    fused = _child(place, FUSED_NAMES)
    if fused is None or not _may_have_heads(place):
        return None
    output = _output_projection(place)
    _refuse_unknown_parts(place, [fused, output])
    doubts: list[str] = []  # the trial decides
    H = _head_count(place, doubts)
    rows = fused.features[1]
    claimed_width = _width_attribute(module)
    if claimed_width is not None and rows != 3 * H * claimed_width:
        width = claimed_width
        G = _key_head_count(place, H, width, None, doubts)
        if rows != (H + 2 * G) * width:
            raise RefusedError(f"its fused projection has {rows} rows, which is not ({H} + 2 x {G}) heads x {width}")
    else:
        if rows % (3 * H):
            raise RefusedError(f"its fused projection has {rows} rows, which is not 3 x {H} heads x a whole width")
        G, width = H, rows // (3 * H)
    slices: dict[Role, HeadSlice] = {
        "query": fused.slice(H, width),
        "key": fused.slice(G, width, start=H * width),
        "value": fused.slice(G, width, start=(H + G) * width),
    }
    layer = _with_output(place, slices, output, H, G, width, width, _kind("fused", [fused]))
    is_as_claimed = acts_as_claimed(layer)
    if is_as_claimed is None:
        raise RefusedError(
            "in which order the rows of its fused projection are used could not be seen in a trial forward"
        )
    if not is_as_claimed:
        raise SeenError(
            "a trial forward shows that its fused projection does not hold all queries, then all keys, then all values"
        )
    return replace(layer, evidence="trial")


# --- evidence


def _may_have_heads(place: Place) -> bool:
    """Tell what is called attention, or names a number of heads, from what only has a map called `in_proj`."""
    is_called = re.search("attention|attn|MLA$", type(place.module).__name__, re.IGNORECASE)
    named = {**_claims(place.module, _HEAD_COUNTS), **_claims(_read(place.module, "config"), ("num_attention_heads",))}
    return bool(is_called or named)


@dataclass(frozen=True)
class _Linear:
    """A linear map, and the path to it from a module that stays in place when the map is replaced."""

    owner: nn.Module
    path: str
    module: nn.Module

    @property
    def is_transposed(self) -> bool:
        return projections.is_transposed(self.module)

    @property
    def features(self) -> tuple[int, int]:
        """Features that come in, and that go out."""
        return projections.features(self.module)

    def slice(self, heads: int, width: int, start: int = 0) -> HeadSlice:
        return HeadSlice(self.owner, f"{self.path}.weight", heads, width, start, self.is_transposed)


def _child(place: Place, names: Iterable[str]) -> _Linear | None:
    """Find the one linear map among the direct children that has one of the names."""
    module = place.module
    found = [_Linear(module, name, child) for name in names if is_linear(child := _read(module, name))]
    return _readable(place, found[0]) if len(found) == 1 else None


def _readable(place: Place, linear: _Linear) -> _Linear:
    """Refuse a linear map whose matrix cannot be read."""
    reason = projections.objection(linear.module)
    if reason is not None:
        raise SeenError(f"its projection `{linear.path}` is {reason}")
    return linear


def _kind(name: str, linears: list[_Linear]) -> str:
    return f"{name} Conv1D" if all(linear.is_transposed for linear in linears) else f"{name} Linear"


def _output_projection(place: Place) -> _Linear | None:
    """Find the output projection: a child, the first of a `to_out` sequence, or BERT's dense layer beside `self`."""
    module = place.module
    found = []
    for name in ROLE_NAMES["output"]:
        path, child = name, _read(module, name)
        if isinstance(child, nn.Sequential) and len(child) > 0:
            path, child = f"{name}.0", child[0]
        if is_linear(child):
            found.append(_Linear(module, path, child))
    if len(found) == 1:
        return _readable(place, found[0])
    if found or place.parent is None:
        return None
    beside = getattr(getattr(place.parent, "output", None), "dense", None)
    # In a block that is not attention itself, `output.dense` is what follows the hidden layer.
    is_bert = bool(re.search("attention|attn", type(place.parent).__name__, re.I)) and module in (
        getattr(place.parent, "self", None),
        getattr(place.parent, "attention", None),
    )
    return _readable(place, _Linear(place.parent, "output.dense", beside)) if is_bert and is_linear(beside) else None


def _refuse_unknown_parts(place: Place, known: list[_Linear | None]) -> None:
    """Refuse a module with parameters that no layout here knows: they may change what the heads receive."""
    named = {id(linear.module) for linear in known if linear is not None}
    for name, child in place.module.named_children():
        parts = [child, *child.modules()]
        if any(id(part) in named for part in parts) or isinstance(child, _HARMLESS) or _HARMLESS_NAMES.search(name):
            continue
        if next(child.parameters(), None) is not None:
            raise RefusedError(f"its part `{name}` ({type(child).__name__}) may change what its heads receive")
    for name, _ in place.module.named_parameters(recurse=False):
        if not _HARMLESS_NAMES.search(name):
            raise RefusedError(f"its parameter `{name}` may change what its heads receive")


def _read(owner: Any, name: str) -> Any:
    """Read an attribute; what raises is absent, as some configs do for what differs from layer to layer."""
    try:
        return getattr(owner, name, None)
    except Exception:
        return None


def _claims(owner: Any, names: Iterable[str]) -> dict[str, int]:
    """Read the whole numbers that a module or config has under any of the names."""
    values = {name: _read(owner, name) for name in names}
    return {name: value for name, value in values.items() if isinstance(value, int) and not isinstance(value, bool)}


def _attribute(module: nn.Module, names: Iterable[str]) -> int | None:
    """Read the one whole number that the module has under any of the names; two that differ are no evidence."""
    values = set(_claims(module, names).values())
    return values.pop() if len(values) == 1 else None


def _width_attribute(module: nn.Module) -> int | None:
    return _attribute(module, _HEAD_WIDTHS)


def _head_count(place: Place, doubts: list[str]) -> int:
    """Establish the number of heads from attributes or the config; what contradicts it is in doubt."""
    own = _claims(place.module, _HEAD_COUNTS)
    if len(set(own.values())) > 1:
        raise RefusedError(f"it names several numbers of heads ({_listed(own)})")
    config = _claims(_read(place.module, "config"), ("num_attention_heads",))
    count = next(iter({**own, **config}.values() if not own else own.values()), None)
    if count is None or count < 1:
        raise RefusedError(f"it does not say how many heads it has (looked for {', '.join(_HEAD_COUNTS)})")
    if any(value != count for value in config.values()):
        doubts.append(f"it names {count} heads, and its config {next(iter(config.values()))}")
    return count


def _key_head_count(place: Place, H: int, width: int, features: int | None, doubts: list[str]) -> int:
    """Establish the number of key heads from attributes, from the config, and from the rows when there are any."""
    own = _claims(place.module, _KEY_HEAD_COUNTS)
    config = _claims(_read(place.module, "config"), ("num_key_value_heads",))
    groups = _claims(place.module, ("num_key_value_groups",))
    told = [*own.values(), *config.values(), *(H // count for count in groups.values() if count > 0 and H % count == 0)]
    if features is None:
        if not told:
            raise RefusedError("it does not say how many key heads it has")
        G = told[0]
    elif features % width:
        raise RefusedError(f"its key projection has {features} rows, which is not a number of heads of width {width}")
    else:
        G = features // width
        if G != H and G not in told:
            names = f"it names {told[0]}" if told else "it names none"
            raise RefusedError(f"its key projection has rows for {G} heads of width {width}, but {names}")
    if any(count != G for count in told):
        doubts.append(f"it has {G} key heads by its rows, and {_listed({**config, **groups, **own})}")
    return G


def _listed(claims: dict[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in claims.items())


def _even(place: Place, role: str, features: int, heads: int) -> int:
    if features % heads:
        raise RefusedError(f"its {role} projection has {features} rows, which {heads} heads do not divide")
    return features // heads


def _agree(place: Place, width: int, H: int) -> None:
    claimed = _width_attribute(place.module)
    if claimed is not None and claimed != width:
        raise RefusedError(f"it names a head width of {claimed}, but its query projection has {H} heads x {width}")


def _with_output(
    place: Place,
    slices: dict[Role, HeadSlice],
    output: _Linear | None,
    H: int,
    G: int,
    width: int,
    value_dim: int,
    kind: str,
) -> AttentionLayer:
    """Complete a layer by its output projection, if one is known."""
    if output is not None:
        received, _ = output.features
        if received != H * value_dim:
            raise RefusedError(f"its output projection takes {received} features, expected {H} heads x {value_dim}")
        slices["output"] = output.slice(H, value_dim)
    return AttentionLayer(
        place.name, place.module, H, G, width, value_dim, kind, slices, None if output is None else output.module
    )
