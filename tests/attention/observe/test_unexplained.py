"""Attention that ran and belongs to no watched layer, or to one in part: what is said of it, and of what nothing is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hdi_callback.attention.observe.compare import unexplained as named
from hdi_callback.attention.observe.compare.cores import ObservedCore
from hdi_callback.attention.observe.compare.samples import MapCall
from hdi_callback.attention.observe.compare.verdicts import RoleVerdict, Verdict
from hdi_callback.attention.observe.scores.axes import Axes


def core(module: str = "block.attn", heads: int = 4, kind: str = "softmax", **fields: Any) -> ObservedCore:
    """One attention of two sequences, five queries and seven keys."""
    names = module.split(".")
    parts = tuple(".".join(names[: count + 1]) for count in range(len(names)))
    own = {"queries": 5, "keys": 7, "parts": parts, "axes": Axes((2, heads), (0,)), **fields}
    return ObservedCore(module=module, module_type="Block", kind=kind, order=1, **own)


def mapped(tokens: int, kind: str = "linear") -> MapCall:
    return MapCall(0, (), "q", kind, tokens, torch.empty(0), torch.empty(0), 0)


def said(cores, verdicts=None, **options):
    paths = {name: name for name in verdicts or {}}
    return named.unexplained(cores, [], verdicts or {}, paths, options.pop("reasons", {}), **options)


def test_attention_outside_watched_layers_is_reported_with_its_size_and_the_remedy():
    (one,) = said([core()])
    assert (one.name, one.module_type, one.layer) == ("block.attn", "Block", "")
    assert one.message == (
        "The attention in `block.attn` (Block, 4 heads, 5 queries and 7 keys) is not watched: it belongs to no "
        "watched layer. Describe it with `register_layout`, or leave it out with exclude=['block.attn']."
    )
    (whole,) = said([core("")], reasons={"": "its heads mix"})
    assert whole.message.startswith("The attention in the model's own forward (Block, ")
    assert whole.message.endswith("is not watched: its heads mix. Describe it with `register_layout`.")


def test_attention_of_a_module_is_reported_once_and_not_if_the_module_was_reported_before():
    assert len(said([core(), core()])) == 1
    assert said([core()], reported=["block"]) == []
    assert len(said([core()], reported=["other"])) == 1


@pytest.mark.parametrize(
    ("modules", "widths", "count"),
    [
        (["attn"], [8], 0),  # a sum with weights of one head, as of a pooling
        (["attn", "attn"], [8, 8], 1),
        (["attn", "attn"], [8, 4], 0),
        (["heads.0", "heads.1"], [8, 8], 2),
        (["heads.0", "others.1"], [8, 8], 0),
    ],
)
def test_attention_of_one_head_is_reported_only_if_there_are_several_of_its_kind(modules, widths, count):
    cores = [core(module, 1, width=width) for module, width in zip(modules, widths, strict=True)]
    found = said(cores)
    assert len(found) == count
    assert all("one by one, each in a separate attention call" in one.reason for one in found)


@pytest.mark.parametrize(
    ("fields", "maps", "expected"),
    [
        ({}, [], True),
        ({"kind": "linear"}, [], False),
        ({"kind": "exp"}, [], True),
        ({"kind": "additive"}, [], False),  # no map gave its values
        ({"tied": 3}, [], False),
        ({"kind": "sigmoid"}, [], False),
        ({}, [mapped(10)], True),  # two sequences of queries
        ({}, [mapped(14)], True),  # of keys
        ({}, [mapped(5), mapped(9)], True),  # of two streams that attend together
        ({}, [mapped(6)], False),
        ({}, [mapped(6, "norm")], True),
        ({"axes": None}, [mapped(20)], True),
        ({"axes": None}, [mapped(14)], True),
        ({"axes": None}, [mapped(6)], False),
        ({"axes": None, "queries": 0, "keys": 0}, [mapped(6)], False),
    ],
)
def test_attention_is_reported_only_if_its_kind_and_its_sizes_are_those_of_attention_over_tokens(
    fields, maps, expected
):
    assert bool(said([core(**fields, maps=maps)])) is expected


def test_a_layer_whose_projections_give_some_of_the_keys_explains_its_attention_in_part():
    one = core("attn")
    part = Verdict(
        "established", "", {"query": RoleVerdict("established", ""), "key": RoleVerdict("established", "", 4)}, one
    )
    (found,) = said([one], {"attn": part})
    assert found.layer == "attn"
    assert (
        "its projections compute 4 of the 7 tokens that are attended to, so that the curves of `attn`" in found.message
    )
    assert said([one], {"attn": Verdict("established", "", {"key": RoleVerdict("established", "")}, one)}) == []
    other = Verdict("established", "", {"key": RoleVerdict("established", "", 3)}, one)
    both = named.unexplained([one], [], {"a": part, "b": other}, {"a": "attn", "b": "attn"}, {})
    assert both == [], "four tokens of the one stream and three of the other are all seven"


def test_a_second_attention_in_a_layer_is_reported_if_its_keys_are_not_the_claimed_ones(monkeypatch):
    one, beside = core("attn"), core("attn")
    rows = SimpleNamespace(map="k2", rows=torch.tensor([[0, 1], [2, 3]]))
    monkeypatch.setattr(named, "find_rows", lambda core, maps, role: rows if core is beside else None)
    own = Verdict("established", "", {}, one, claimed=frozenset({("k1", 0)}))
    (found,) = said([one, beside], {"attn": own})
    assert "it computes another attention too, whose keys come from `k2`" in found.message
    same = Verdict("established", "", {}, one, claimed=frozenset({("k2", 3)}))
    assert said([one, beside], {"attn": same}) == []
