"""Dotted paths of modules: what is within what, and names as short as they can be."""

from __future__ import annotations

import pytest

from hdi_callback.attention.names import containers, is_inside, is_within, short_names


@pytest.mark.parametrize(
    ("names", "short"),
    [
        ([], []),
        (["encoder.attn"], ["encoder.attn"]),
        (["model.layers.0.self_attn", "model.layers.11.self_attn"], ["0", "11"]),
        (["encoder.0.attn", "decoder.0.attn"], ["encoder", "decoder"]),
        (["a.0.self.b", "a.0.cross.b", "a.1.self.b"], ["0.self", "0.cross", "1.self"]),
        (["attn", "attn.inner"], ["attn", "attn.inner"]),  # nothing would be left of the first
        (["a.b", "a.b"], ["a.b", "a.b"]),
    ],
)
def test_what_all_names_begin_and_end_with_is_left_out(names, short):
    assert short_names(names) == short


def test_the_modules_around_a_path_are_those_that_it_begins_with_the_innermost_first():
    assert containers("model.layers.0.attn") == ["model.layers.0", "model.layers", "model", ""]
    assert containers("model") == [""]
    assert containers("") == []


def test_a_path_is_within_itself_and_what_is_around_it_and_not_within_what_begins_with_the_same_letters():
    assert is_within("layers.1.attn", {"layers.1.attn"})
    assert is_within("layers.1.attn", {"layers"})
    assert is_within("layers.1.attn", {""})
    assert not is_within("layers.10.attn", {"layers.1"})
    assert is_inside("layers.1.attn", "layers.1")
    assert is_inside("layers.1.attn", "")
    assert not is_inside("layers.10.attn", "layers.1")
    assert not is_inside("layers.1", "layers.1")
