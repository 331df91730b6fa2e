"""Attention as recent models write it: overlapping windows, sinks, arguments that may be left out."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdi_callback.attention import survey
from hdi_callback.attention.finding.runtime_finder import RuntimeFinder
from hdi_callback.attention.layer.registry import Place
from hdi_callback.attention.trace.inputs import Inputs
from tests.attention.wild.idioms import attend, join, split
from tests.attention.wild.plain import Four
from tests.attention.wild.recent import SecondStreamIfGiven, ValuesOfAnEarlierLayer
from tests.attention.wild.truth import MODEL, WIDTH, H


class OverlappingWindows(Four):
    """Every window of four tokens attends to itself and to its neighbours."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        q = q.unflatten(2, (-1, 4))
        k, v = (F.pad(one, (0, 0, 4, 4)).unfold(2, 12, 4).mT for one in (k, v))
        places = torch.arange(-4, x.shape[1] + 4).unfold(0, 12, 4)
        hidden = ((places < 0) | (places >= x.shape[1]))[:, None]
        scores = (q @ k.mT / WIDTH**0.5).masked_fill(hidden, float("-inf"))
        return self.o(join((scores.softmax(-1) @ v).flatten(2, 3)))


class OverlappingPairsOfWindows(Four):
    """Scores of pairs of windows, each of which is a product of its own; weights are put together behind them."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        q, k, v = (one.unflatten(2, (-1, 4)) for one in (q, k, v))
        before = [one.roll(1, 2) for one in (k, v)]
        scores = torch.cat([q @ before[0].mT, q @ k.mT], -1) / WIDTH**0.5
        first = torch.arange(scores.shape[2]) == 0
        scores = scores.masked_fill(first[:, None, None] & (torch.arange(8) < 4), float("-inf"))
        return self.o(join((scores.softmax(-1) @ torch.cat([before[1], v], -2)).flatten(2, 3)))


class PromptsOfSeveralPoints(Four):
    """Tokens of each of several prompts, as in a mask decoder."""

    def forward(self, x: Tensor) -> Tensor:
        batch, points = x.shape[:2]
        q, k, v = (m(x).view(batch * points, -1, H, WIDTH).transpose(1, 2) for m in (self.q, self.k, self.v))
        return self.o(join(attend(q, k, v))).view(batch, points, -1, MODEL)


class LearnedSinks(Four):
    """A learned score for each head takes a part of the weights, and gives nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(H))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        scores = q @ k.mT / WIDTH**0.5
        sinks = self.sinks.view(1, -1, 1, 1).expand(len(x), -1, x.shape[1], 1)
        return self.o(join(torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v))


class OverHeadsByVmap(Four):
    """One head is written down, and mapped over all of them."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        return self.o(join(torch.vmap(torch.vmap(attend))(q, k, v)))


@pytest.mark.parametrize(
    "kind",
    [OverlappingWindows, OverlappingPairsOfWindows, PromptsOfSeveralPoints, LearnedSinks, OverHeadsByVmap],
)
def test_heads_side_by_side_are_read_before_training(kind):
    torch.manual_seed(0)
    model = nn.Sequential(kind())
    found = survey(model)
    assert [one.name for one in found.layers] == ["0"]
    assert not found.refused
    (layer,) = found.layers
    for role in ("query", "key", "value"):
        part = getattr(model[0], role[0])
        assert torch.equal(layer.weight(role), part.weight.view(H, WIDTH, MODEL))
    assert torch.equal(layer.weight("output"), model[0].o.weight.T.view(H, WIDTH, MODEL))


class TwoKernelsSubtracted(Four):
    """Differential attention by two fused kernels, whose outputs are subtracted."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)).unflatten(1, (-1, 2)) for m in (self.q, self.k, self.v))
        v = v.transpose(2, 3).flatten(3)
        one, two = (F.scaled_dot_product_attention(q[:, :, i], k[:, :, i], v) for i in range(2))
        out = F.rms_norm(one - 0.5 * two, (2 * WIDTH,))
        return self.o(join(out))


def test_attention_by_a_difference_of_two_kernels_is_two_layers_with_separate_rows():
    torch.manual_seed(0)
    model = nn.Sequential(TwoKernelsSubtracted())
    found = survey(model)
    assert not found.refused
    assert [one.name for one in found.layers] == ["0.k.0", "0.k.1"]
    for number, layer in enumerate(found.layers):
        assert layer.output_projection is None, "its input is a difference"
        for role in ("query", "key"):
            weight = model[0].get_parameter(f"{role[0]}.weight")
            assert torch.equal(layer.weight(role), weight.view(H // 2, 2, WIDTH, MODEL)[:, number])
        assert torch.equal(layer.weight("value"), model[0].v.weight.view(H // 2, 2 * WIDTH, MODEL))


class CutInTwoWays(Four):
    """Two softmaxes of the same rows, which the second cuts into other heads: neither is the layer."""

    def forward(self, x: Tensor) -> Tensor:
        out = [attend(*(split(m(x), heads) for m in (self.q, self.k, self.v))) for heads in (H, 2)]
        return self.o(join(out[0]) + join(out[1]))


def test_two_softmaxes_that_split_the_same_projections_into_different_heads_are_refused():
    found = survey(nn.Sequential(CutInTwoWays()))
    assert not found.layers
    assert [one.reason for one in found.refused] == [
        "several of its softmaxes share projections and split them into different heads"
    ]


class ValuesInTwoCalls(Four):
    """As in DiffLlama: both halves of the values are weighed alike, in a call each."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (split(m(x)) for m in (self.q, self.k, self.v))
        halves = [half.repeat(1, 2, 1, 1) for half in value.chunk(2, 1)]
        one, two = (join(attend(query, key, half)) for half in halves)
        return self.o(one - two)


def test_two_softmaxes_of_the_same_queries_and_keys_with_different_values_are_refused():
    (refusal,) = survey(nn.Sequential(ValuesInTwoCalls())).refused
    assert refusal.reason == "several of its softmaxes have the same queries and keys, but each has values of its own"


class FeatureByFeature(Four):
    """Weights of tokens are made for each feature by itself."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x)[:, :, None] * self.k(x)[:, None]
        return self.o((scores.softmax(2) * self.v(x)[:, None]).sum(2))


@pytest.mark.parametrize("is_run", [False, True])
def test_attention_per_feature_is_refused_because_its_values_are_not_weighted_by_a_matrix_product(is_run):
    model = nn.Sequential(FeatureByFeature())
    found = survey(model, forward=(lambda: model(torch.randn(2, 7, MODEL))) if is_run else None)
    assert not found.layers
    assert [one.reason for one in found.refused] == ["its values are not weighted by a matrix product"]


class Blocks(nn.Module):
    """Gives the attention of its second block what may be left out."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.second = kind(), kind()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.second(self.first(batch["x"]), batch["other"])


@pytest.mark.parametrize(
    ("kind", "argument", "reason"),
    [
        (ValuesOfAnEarlierLayer, "first", "the input that is added to the values from `v`"),
        (SecondStreamIfGiven, "context", ""),
    ],
)
def test_heads_that_an_optional_argument_changes_stay_undecided_until_a_forward_shows_if_it_is_passed(
    kind, argument, reason
):
    torch.manual_seed(0)
    model = Blocks(kind)
    found = survey(model)
    assert not found.layers
    assert {one.name for one in found.refused} == {"first", "second"} == {one.name for one in found.undecided}
    assert all(f"if the argument `{argument}` is passed" in one.reason for one in found.refused)
    batch = {"x": torch.randn(2, 7, MODEL), "other": torch.randn(2, 7, MODEL)}
    found = survey(model, forward=lambda: model(batch))
    by_name = {one.name: one for one in found.layers}
    assert by_name["first"].num_heads == H
    assert not by_name["first"].left_out
    said = [one.reason for one in found.refused] + [one.left_out for one in found.layers if one.left_out]
    if reason:
        assert [reason in one for one in said] == [True]
    else:
        assert (sorted(by_name), said) == (["first", "second.add_k", "second.k"], [])


class Star(nn.Module):
    """Passes on whatever it is given."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.block = kind()

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.block(*inputs)


class Keywords(Star):
    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        return self.block(x, **others)


class Renamed(Star):
    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        return self.block(x, others.get("other"))


class Boxed(Star):
    def forward(self, x: Tensor, more: dict[str, Tensor] | None = None) -> Tensor:
        return self.block(x, None if more is None else more["other"])


class Swallowed(Star):
    def forward(self, x: Tensor, mask: Tensor | None = None, **others: Tensor) -> Tensor:
        return self.block(x)


@pytest.mark.parametrize("kind", [ValuesOfAnEarlierLayer, SecondStreamIfGiven])
@pytest.mark.parametrize("holder", [Star, Keywords, Renamed, Boxed])
def test_heads_stay_undecided_if_a_parent_may_pass_the_optional_argument(holder, kind):
    found = survey(holder(kind))
    assert not found.layers
    assert [one.name for one in found.undecided] == ["block"]


@pytest.mark.parametrize("kind", [ValuesOfAnEarlierLayer, SecondStreamIfGiven])
def test_heads_are_read_if_no_parent_can_pass_the_optional_argument(kind):
    found = survey(Swallowed(kind))
    assert [one.name for one in found.layers] == ["block"]
    assert not found.refused


class OthersByPosition(SecondStreamIfGiven):
    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return super().forward(x, *others)


class OthersByKeyword(SecondStreamIfGiven):
    def forward(self, x: Tensor, **options: Tensor) -> Tensor:
        return super().forward(x, options.get("others"))


class OthersOfAnotherWidth(SecondStreamIfGiven):
    def __init__(self) -> None:
        super().__init__()
        self.add_q, self.add_k, self.add_v = (nn.Linear(10, MODEL) for _ in range(3))


@pytest.mark.parametrize(
    ("kind", "argument"),
    [(OthersByPosition, "*others"), (OthersByKeyword, "others"), (OthersOfAnotherWidth, "context")],
)
def test_an_optional_second_stream_leaves_heads_undecided_in_whatever_form_it_is_taken(kind, argument):
    found = survey(nn.ModuleList([kind()]))
    assert not found.layers
    assert [f"if the argument `{argument}` is passed" in one.reason for one in found.refused] == [True]


class NeedsTables(Four):
    """Inputs that nobody can make up."""

    def forward(self, x: Tensor, tables: dict[str, Tensor]) -> Tensor:
        q, k, v = (split(m(x * tables["scale"])) for m in (self.q, self.k, self.v))
        return self.o(join(attend(q, k, v)))


class NotCalled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(MODEL, MODEL), NeedsTables()

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_a_module_that_the_forward_did_not_call_is_not_advised_to_pass_a_forward():
    model = NotCalled()
    (before,) = survey(model).refused
    assert "forward=" in before.message
    (after,) = survey(model, forward=lambda: model(torch.randn(2, 7, MODEL))).refused
    assert after.name == "unused"
    assert after.reason == f"{before.reason}, and no call of it was observed in the forward that was run"
    assert "forward=" not in after.message


def test_a_module_that_fails_on_its_recorded_inputs_is_refused_for_that_failure():
    search = RuntimeFinder([Place("block", NeedsTables(), None)])
    assert search.found({"block": [Inputs((torch.randn(2, 7, MODEL),), {})]}) == []
    assert search.reasons == {
        "block": "it could not be run by itself with its arguments from the first captured forward: it raises "
        "TypeError (NeedsTables.forward() missing 1 required positional argument: 'tables')"
    }
    assert len(search.found({"block": [Inputs((torch.randn(2, 7, MODEL), {"scale": torch.ones(1)}))]})) == 1


def test_a_module_that_is_too_slow_on_its_recorded_inputs_is_refused_for_the_time_it_takes(monkeypatch):
    search = RuntimeFinder([Place("block", NeedsTables(), None)])
    monkeypatch.setattr("hdi_callback.attention.trace.kinds.MOST_SECONDS", 0.0)
    assert search.found({"block": [Inputs((torch.randn(2, 7, MODEL), None))]}) == []
    assert "takes too long" in search.reasons["block"]


class ModelOutputWithNoAttention(NamedTuple):
    hidden: Tensor


class Convolutions(nn.Module):
    """No attention, as the name of what it returns says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(MODEL, MODEL), nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor, sizes: dict[str, Tensor]) -> ModelOutputWithNoAttention:
        return ModelOutputWithNoAttention(self.second(self.first(x * sizes["scale"]).relu()))


def test_a_module_that_only_names_a_variable_attention_is_not_reported():
    assert survey(nn.Sequential(Convolutions())).refused == ()


class AMapForEachOutput(nn.Module):
    """Heads of their own module each, from queries to a part of what is added up, with factors."""

    def __init__(self, factors: tuple[float, ...]) -> None:
        super().__init__()
        self.factors = factors
        self.heads = nn.ModuleList(
            nn.ModuleDict({role: nn.Linear(MODEL, WIDTH) for role in "qkv"} | {"o": nn.Linear(WIDTH, MODEL)})
            for _ in factors
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = [
            head["o"]((head["q"](x) @ head["k"](x).mT / WIDTH**0.5).softmax(-1) @ head["v"](x)) for head in self.heads
        ]
        return sum(factor * part for factor, part in zip(self.factors, parts, strict=True))


@pytest.mark.parametrize(
    ("factors", "heads"),
    [((1.0, 1.0, 1.0), [3]), ((1.0, 1.0, 2.0), [3]), ((1.0, 1.0, -1.0), [1, 2]), ((0.0, 0.0), [1, 1])],
)
def test_heads_with_an_output_projection_each_are_one_layer_if_only_their_sum_is_used(factors, heads):
    torch.manual_seed(0)
    model = nn.Sequential(AMapForEachOutput(factors))
    layers = survey(model).layers
    assert sorted(one.num_heads for one in layers) == heads
    found = [tuple(one.flatten().tolist()) for layer in layers for one in layer.weight("key")]
    assert sorted(found) == sorted(tuple(head["k"].weight.flatten().tolist()) for head in model[0].heads)
