"""Which modules are read as one kind: those that hold the same, of which no run of their own is needed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hdi_callback.attention import find_attention
from hdi_callback.attention.finding.discovery import survey
from hdi_callback.attention.trace import kinds, support
from hdi_callback.attention.trace.layers import Found
from hdi_callback.attention.trace.run import Traceable
from hdi_callback.attention.trace.states import differing_attributes, watched
from hdi_callback.attention.trace.support import Support, derivatives
from hdi_callback.attention.trace.verify import contradiction_of
from tests.attention import models as by_hand
from tests.attention.models import D, H


def with_buffer(value: float) -> nn.Module:
    module = by_hand.NanoGPT()
    module.register_buffer("slopes", torch.full((3,), value))
    return module


def with_value(value: object) -> nn.Module:
    module = by_hand.NanoGPT()
    module.kept = value
    return module


def bound(name: str) -> nn.Module:
    """Keep one of its own methods, as those do that choose how to attend when they are made."""
    module = by_hand.NanoGPT()
    module.chosen = getattr(module, name)
    return module


def tied(is_tied: bool) -> nn.Module:
    module = by_hand.Separate()
    module.twin = module.k_proj if is_tied else nn.Linear(D, D)
    return module


class Unequal:
    """A key that cannot be compared."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")


class Equal:
    """A key that equals all others, whatever it holds."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return True


SHARED = object()
ALIKE = [
    (by_hand.NanoGPT(), by_hand.NanoGPT()),
    (with_buffer(1.0), with_buffer(1.0)),
    (with_value([1, {"a": (2.0, None)}]), with_value([1, {"a": (2.0, None)}])),
    (with_value(SimpleNamespace(width=8)), with_value(SimpleNamespace(width=8))),
    (with_value(SHARED), with_value(SHARED)),
    (by_hand.NanoGPT().train(), by_hand.NanoGPT().eval()),
    (tied(True), tied(True)),
    (bound("extra_repr"), bound("extra_repr")),
    (with_value({1, 2}), with_value({2, 1})),
]
DIFFERENT = [
    (by_hand.NanoGPT(), by_hand.Separate()),
    (with_buffer(1.0), with_buffer(2.0)),
    (with_value(1), with_value(2)),
    (with_value(1), with_value(1.0)),
    (with_value(SimpleNamespace(width=8)), with_value(SimpleNamespace(width=4))),
    (with_value({"a": 1}), with_value({"b": 1})),
    (with_value(object()), with_value(object())),
    (with_value({Unequal(): 1}), with_value({Unequal(): 1})),
    (with_value({Equal(1): 1}), with_value({Equal(2): 1})),
    (with_value(lambda x: x), with_value(lambda x: x)),
    (with_value(nn.Identity()), with_value(nn.ReLU())),
    (tied(True), tied(False)),
    (bound("extra_repr"), bound("state_dict")),
    (with_value({1, 2}), with_value({1, 3})),
    (with_value(frozenset({SHARED})), with_value(frozenset({SHARED, 1}))),
    (tied(False), tied(True)),
    (with_value(torch.zeros(2, dtype=torch.int8)), with_value(torch.zeros(2))),
]


def are_alike(one: nn.Module, other: nn.Module) -> bool:
    return differing_attributes(one, other) == frozenset()


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_modules_with_equal_structure_are_equal_whatever_their_weights(one, other):
    assert are_alike(one, other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_modules_that_differ_in_anything_a_forward_may_read_are_not_equal(one, other):
    assert not are_alike(one, other)


def test_hooks_make_no_difference_as_no_copy_has_them():
    one, other = by_hand.NanoGPT(), by_hand.NanoGPT()
    one.register_forward_hook(lambda *_: None)
    assert are_alike(one, other)


class Choosing(by_hand.Separate):
    """Four heads, or two of twice the width, of the same parameters."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.count = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.count, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_each_of_many_layers_of_two_kinds_has_the_heads_that_it_computes(monkeypatch):
    made = []
    init = Traceable.__init__
    monkeypatch.setattr(Traceable, "__init__", lambda self, module: (made.append(module), init(self, module))[1])
    model = nn.ModuleList(Choosing(heads) for heads in (4, 2, 4, 4, 2, 2))
    layers = find_attention(model)
    assert [layer.num_heads for layer in layers] == [4, 2, 4, 4, 2, 2]
    assert {id(one) for one in made} >= {id(model[0]), id(model[1])}
    assert not {id(one) for one in made} & {id(one) for one in model[2:]}
    for layer in layers:
        assert layer.weight("key").data_ptr() == layer.module.k_proj.weight.data_ptr()


class Numbered(by_hand.Separate):
    """A layer that knows its number, and may do something with it."""

    def __init__(self, number: int, use: str = "", width: int = D // H) -> None:
        super().__init__()
        self.number, self.use, self.width = number, use, width

    def heads(self) -> int:
        width = {
            "": lambda: D // H,
            "read": lambda: D // H * (1 + self.number % 2),
            "asked": lambda: D // H * (1 + getattr(self, "number", 0) % 2),
            "listed": lambda: D // H * (1 + vars(self)["number"] % 2),
            "of a class": lambda: D // H if type(self) is Numbered else D,
            "by the other": lambda: self.width if self.number else D // H,
        }[self.use]()
        return D // width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads(), -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_layers_that_differ_only_in_an_attribute_no_forward_reads_are_traced_at_most_twice(monkeypatch):
    made = []
    init = Traceable.__init__
    monkeypatch.setattr(Traceable, "__init__", lambda self, module: (made.append(module), init(self, module))[1])
    model = nn.ModuleList(nn.Sequential(Numbered(number), nn.Linear(D, D)) for number in range(6))
    layers = find_attention(model)
    assert [(layer.name, layer.num_heads) for layer in layers] == [(f"{number}.0", H) for number in range(6)]
    assert {id(one) for one in made} <= {id(part) for one in model[:2] for part in one.modules()}
    for layer, one in zip(layers, model):
        assert layer.module is one[0]
        assert layer.weight("key").data_ptr() == one[0].k_proj.weight.data_ptr()


@pytest.mark.parametrize("use", ["read", "asked", "listed"])
def test_an_attribute_that_the_forward_reads_decides_the_heads_of_each_layer(use):
    model = nn.ModuleList(Numbered(number, use) for number in (0, 2, 1, 4, 3))
    assert [layer.num_heads for layer in find_attention(model)] == [H, H, H // 2, H, H // 2]


def test_an_attribute_that_is_read_only_under_another_attribute_is_not_overlooked():
    kinds = [(0, D // H), (0, D // 2), (0, D), (1, D // 2), (2, D // H), (1, D // 2)]
    model = nn.ModuleList(Numbered(number, "by the other", width) for number, width in kinds)
    assert [layer.num_heads for layer in find_attention(model)] == [H, H, H, 2, H, 2]


def test_a_layer_whose_forward_checks_its_own_class_is_read_right():
    model = nn.ModuleList(Numbered(number, "of a class") for number in range(4))
    assert [layer.num_heads for layer in find_attention(model)] == [H] * 4


def test_differing_attributes_are_listed_with_the_path_of_their_module():
    one, other = nn.Sequential(Numbered(0), Numbered(0)), nn.Sequential(Numbered(0), Numbered(1, "read"))
    assert differing_attributes(one, other) == {("1", "number"), ("1", "use")}


class Reading(by_hand.Separate):
    """Reads its number while it is copied."""

    number = 0

    def __deepcopy__(self, memo):
        return self


def test_modules_that_may_read_attributes_while_copied_are_not_compared_by_attributes():
    one, other = Reading(), Reading()
    other.number, one.number = 1, 0
    assert differing_attributes(one, other) is None


class NumberedMap(nn.Linear):
    """A linear map that knows the number of its layer."""

    number = 0


@pytest.mark.parametrize("of", ["q_proj", "out_proj"])
def test_layers_whose_projections_differ_in_an_attribute_are_all_read(of):
    model = nn.ModuleList(Numbered(0) for _ in range(4))
    for number, layer in enumerate(model):
        setattr(layer, of, NumberedMap(D, D))
        getattr(layer, of).number = number
    assert differing_attributes(model[0], model[1]) == {(of, "number")}
    assert [layer.num_heads for layer in find_attention(model)] == [H] * 4


MADE: list[type] = []


class Listed(Numbered):
    """Keeps a list of its subclasses."""

    def __init_subclass__(cls, **options: object) -> None:
        MADE.append(cls)


def test_a_module_watched_for_attribute_reads_is_restored_and_leaves_no_subclass():
    module = nn.Sequential(Listed(3))
    before = dict(vars(module[0]))
    with pytest.raises(RuntimeError, match="in the block"), watched(module, [("0", "number"), ("0", "use")]) as used:
        assert used == set()
        assert module[0].number == 3
        assert used == {("0", "number")}
        module[0].use = "read"
        assert used == {("0", "number"), ("0", "use")}
        raise RuntimeError("in the block")
    assert type(module[0]) is Listed
    assert vars(module[0]) == {**before, "use": "read"}
    assert not MADE


def disjoint(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.unflatten(-1, (heads, -1)).movedim(-2, 0)  # (heads, tokens, width)


def shared(x: torch.Tensor, heads: int) -> torch.Tensor:
    return disjoint(x, heads // 2).repeat_interleave(2, 0)


def mixed(x: torch.Tensor, heads: int) -> torch.Tensor:
    one = disjoint(x, heads)
    return one + 1e-6 * one.roll(1, 0)


@pytest.mark.parametrize("form", [disjoint, shared, mixed])
@pytest.mark.parametrize("heads", [2 * H, 4 * H])
def test_supports_of_many_parts_together_are_those_of_each_part_alone(form, heads):
    torch.manual_seed(0)
    leaf, other = torch.randn(3, 4 * heads, requires_grad=True), torch.randn(3, 4 * heads, requires_grad=True)
    output = form(leaf * 2.0, heads) + 3.0 * form(other, heads)
    tokens = torch.arange(3)
    parts = [3 * head + tokens for head in range(heads)]
    parts += [parts[0], parts[-1]]
    together = Support.of_each(output, parts, [leaf, other])
    alone = [Support.of(output, [leaf, other], at) for at in parts]
    assert len(together) == len(alone)
    for one, expected in zip(together, alone):
        assert one.masks.keys() == expected.masks.keys() == {0, 1}
        assert all(torch.equal(mask, expected.masks[number]) for number, mask in one.masks.items())


def test_overlapping_parts_have_separate_supports():
    leaf = torch.randn(16, 2, requires_grad=True)
    parts = [torch.tensor([row, row + 1]) for row in range(12)]
    together = Support.of_each(leaf * 1.0, parts, [leaf])
    assert [one.positions(0) for one in together] == [(row, row + 1) for row in range(12)]


def test_supports_of_disjoint_parts_take_logarithmically_many_derivatives(monkeypatch):
    asked = []
    monkeypatch.setattr(support, "derivatives", lambda *args: asked.append(args) or derivatives(*args))
    leaf = torch.randn(3, 64, requires_grad=True)
    parts = [3 * head + torch.arange(3) for head in range(16)]
    Support.of_each(disjoint(leaf * 2.0, 16), parts, [leaf])
    assert len(asked) == 1 + 4, "all at once, and one for each binary digit of 16 numbers"


def test_a_column_is_read_where_all_positions_agree():
    codes = torch.tensor([[0, 1, -2, -1, 3], [0, 2, -2, -1, -1]])
    assert support.agreed(codes).tolist() == [0, -2, -2, -1, 3]


class Block(nn.Module):
    """The same parameters and shapes, whether it attends or not."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.inner, self.attends = by_hand.NanoGPT(), attends

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if self.attends else self.inner.c_proj(x)


class BlockItself(by_hand.NanoGPT):
    """The same, of attention without a module around it."""

    attends = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.attends else self.c_proj(x)


def itself(attends: bool) -> nn.Module:
    module = BlockItself()
    module.attends = attends
    return module


@pytest.mark.parametrize("make", [Block, itself])
@pytest.mark.parametrize("attends", [(False, True), (True, False), (False, True, False, True)])
def test_a_module_without_attention_does_not_decide_for_another_of_its_class(make, attends):
    model = nn.ModuleList(make(one) for one in attends)
    found = survey(model)
    watched = {layer.name.split(".")[0] for layer in found.layers}
    reported = {one.name.split(".")[0] for one in found.refused}
    assert {str(place) for place, one in enumerate(attends) if one} <= watched | reported


def test_a_run_that_reads_all_attention_is_preferred_to_one_that_reads_part_or_none():
    layer, refused = Found("", layer=object()), Found("", reason="its keys have no rows")
    whole, cut_off = SimpleNamespace(error=None), SimpleNamespace(error=RuntimeError())
    traced = [
        kinds._Traced("attn", nn.Identity(), run=run, found=found)
        for run, found in [(whole, None), (whole, []), (whole, [refused]), (whole, [layer, refused]), (whole, [layer])]
    ]
    assert [one.worth for one in traced] == [0, 0, 1, 2, kinds._BEST]
    assert kinds._BEST == 3
    assert kinds._Traced("attn", nn.Identity(), run=cut_off, found=[layer]).worth == 2


def test_a_claim_is_contradicted_by_the_layer_or_the_refusal_found_for_its_module():
    (claim,) = find_attention(nn.ModuleDict({"attn": by_hand.NanoGPT()}))
    other = replace(claim, module=nn.Identity())
    elsewhere = [Found("attn.part", reason="of a part"), Found("", layer=other)]
    assert contradiction_of(claim, [], "attn") is None
    assert contradiction_of(claim, elsewhere, "attn") is None
    assert (
        contradiction_of(claim, [*elsewhere, Found("", reason="its keys have no rows")], "attn")
        == "its keys have no rows"
    )
    fewer = replace(claim, num_heads=claim.num_heads // 2, num_key_heads=1)
    said = contradiction_of(fewer, [Found("", layer=claim)], "attn")
    assert said.startswith(f"it computes {H} heads and {H} key heads")
    assert contradiction_of(fewer, [Found("", layer=claim), Found("", layer=fewer)], "attn") is None
