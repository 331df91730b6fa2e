"""Single steps by which a traced run is read: which tokens, rows and modules they choose, and what they refuse."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from hdi_callback.attention.trace.core_view import CoreView
from hdi_callback.attention.trace.graph_cut import MOST_ELEMENTS, GraphCut
from hdi_callback.attention.trace.head_rows import NoHeadsError, Rows, Units
from hdi_callback.attention.trace.joining import _are_terms_of_a_sum
from hdi_callback.attention.trace.layers import _owner
from hdi_callback.attention.trace.maps import is_like_a_map
from hdi_callback.attention.trace.ordering import centre
from hdi_callback.attention.trace.outputs import _refuse_mixed
from hdi_callback.attention.trace.own_inputs import refuse_inputs_of_their_own
from hdi_callback.attention.trace.parts import CoreParts
from hdi_callback.attention.trace.products import UpstreamProducts
from hdi_callback.attention.trace.tied_rows import _columns
from hdi_callback.attention.trace.unread import is_over_tokens


def fake(**attributes: Any) -> Any:
    return cast("Any", SimpleNamespace(**attributes))


def leaf(parameter: str, output: torch.Tensor, map_input: torch.Tensor) -> Any:
    return fake(parameter=parameter, output=output, input=map_input, start=0)


def test_the_rows_of_a_unit_are_selected_within_its_own_matrix():
    tensor = torch.arange(24).view(2, 4, 3)
    units = Units((torch.tensor([0, 2]), torch.tensor([1, 3])))
    assert torch.equal(units.of(tensor, 3), tensor[1, [1, 3]])
    assert torch.equal(Units().of(tensor, 1), tensor[1])


def test_kept_tokens_are_numbered_within_the_sequence_of_each_unit():
    view = fake(tensor=lambda role: torch.zeros(4, 5, 8), units=Units(), tokens=torch.tensor([0, 3]))
    assert CoreView.at(view, 2, "value").tolist() == [10, 13]


def test_a_traced_run_whose_features_need_too_much_memory_is_refused():
    tokens = torch.empty(MOST_ELEMENTS // 4 + 1, 1, device="meta")
    with pytest.raises(ValueError, match="too much memory"):
        GraphCut.draw_output(fake(), "weight", tokens, 4)


def test_heads_whose_projections_take_different_inputs_are_refused():
    trace = fake(leaves=[leaf(f"{width}.weight", torch.zeros(5, 8), torch.zeros(5, width)) for width in (4, 6)])
    rows = [Rows(f"{width}.weight", tuple(range(8))) for width in (4, 6)]
    refuse_inputs_of_their_own(trace, {"query": rows[:1], "key": [rows[1], rows[1]]})
    with pytest.raises(NoHeadsError, match="from an input of its own"):
        refuse_inputs_of_their_own(trace, {"query": rows})


@pytest.mark.parametrize("other", [torch.ones(3, 5), -torch.ones(3, 4), torch.zeros(3, 4), torch.eye(3, 4)])
def test_heads_are_terms_of_one_sum_only_if_their_derivatives_are_proportional(other):
    ones, weighed = torch.ones(3, 4), torch.tensor([[1.0], [2.0], [0.5]]) * torch.ones(3, 4)
    assert _are_terms_of_a_sum(ones, weighed)
    assert not _are_terms_of_a_sum(ones, other)


def test_a_layer_belongs_to_the_innermost_module_that_contains_its_keys_and_values():
    class Part(nn.Module):
        def __init__(self, **parts: nn.Module) -> None:
            super().__init__()
            for name, part in parts.items():
                self.add_module(name, part)

    heads = nn.ModuleList([Part(k=nn.Linear(2, 2), inner=Part()) for _ in range(2)])
    trace = fake(run=fake(module=Part(attention=Part(heads=heads))))

    def owner(places: list[str]) -> str:
        rows = [fake(parameter=f"attention.heads.{place[0]}.k.weight") for place in places]
        cores = [fake(path=f"attention.heads.{place}") for place in places]
        return _owner(trace, cores, cast("Any", {"key": rows, "value": rows}))

    assert owner(["0.inner"]) == "attention.heads.0"
    assert owner(["0.inner", "1.inner"]) == "attention"


@pytest.mark.parametrize(("dtype", "is_map"), [(torch.int8, True), (torch.uint8, True), (torch.int64, False)])
def test_an_integer_weight_marks_a_quantised_linear_map(dtype, is_map):
    module = nn.Module()
    module.register_buffer("weight", torch.zeros(4, 4, dtype=dtype))
    assert is_like_a_map(module) is is_map


def test_mixed_outputs_without_an_output_projection_are_refused_for_that():
    heads = fake(rows={"key": [Rows("k.weight", (0, 1))]})
    with pytest.raises(NoHeadsError, match="no output projection was found"):
        _refuse_mixed(fake(run=fake(inputs=[]), cores=[]), [], heads, None, torch.zeros(1), is_repeated=False)


def test_a_product_of_softmax_weights_counts_as_weights_and_one_with_values_does_not():
    x = torch.randn(2, 3, 4, requires_grad=True)
    weights = (x @ (2 * x).mT).softmax(-1)
    behind = UpstreamProducts([])
    assert behind.are_weights((weights @ weights).grad_fn)
    assert not behind.are_weights((weights @ x).grad_fn)
    assert not behind.are_weights((x * 2).softmax(-1).square().grad_fn), "no scores"


def test_scores_of_one_unbatched_sequence_are_recognised_as_scores_over_tokens():
    queries, keys = (torch.randn(5, 8, requires_grad=True) for _ in range(2))
    run = fake(
        tensors=[queries, keys], leaves=[leaf(name, one, torch.zeros(5, 8)) for name, one in zip("qk", (queries, keys))]
    )
    assert is_over_tokens(run, queries @ keys.mT)
    assert not is_over_tokens(run, queries @ torch.randn(8, 5)), "of one token each"


def test_rows_that_act_on_several_output_columns_have_no_columns():
    made = torch.randn(6, 4, requires_grad=True)
    run = fake(tensors=[made], leaves=[leaf("v.weight", made, torch.zeros(6, 4))])
    rows = torch.stack([made[:3], made[3:].roll(1, -1)])
    assert _columns(run, rows.movedim(0, -1).flatten(-2)) is not None
    assert _columns(run, made.cumsum(-1)) is None


def test_queries_and_keys_are_found_from_the_logits_if_the_weights_have_no_derivative():
    logits, found = torch.zeros(2, 5, 5), ["a query and its keys"]
    parts = fake(core=fake(weights=torch.full((2, 5, 5), 0.2)), units=Units(), row=None, is_last_first=False)
    parts._logits = lambda: logits
    parts._query_keys_of_row = lambda n, row, made=None: found if made is logits and row == 2 else []
    assert CoreParts.query_keys_of(parts, 0) == found


def test_a_mean_that_is_subtracted_belongs_to_the_projection_only_if_it_is_a_mean_of_its_output():
    keys, places = (torch.randn(5, 4, requires_grad=True) for _ in range(2))
    for centred in (keys, places):
        made = keys + places - centred.mean(-1, keepdim=True)
        leaves = [leaf("k.weight", keys, torch.zeros(5, 4)), leaf("places.weight", places, torch.zeros(5, 4))]
        run = fake(centred=True, tensors=[keys, places], leaves=leaves)
        trace = fake(run=run, with_means=(run, [None]))
        view = fake(trace=trace, number=0, first=0, tensor=lambda role, core, made=made: made[None])
        view.at = lambda unit, role: torch.arange(5)
        heads: Any = {"key": [Rows("k.weight", (0, 1, 2, 3))]}
        centre(view, heads)
        assert heads["key"][0].centring == ("head" if centred is keys else "")
