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
def test_short_names_leave_out_the_common_prefix_and_suffix(names, short):
    assert short_names(names) == short


def test_the_containers_of_a_path_are_its_prefixes_innermost_first():
    assert containers("model.layers.0.attn") == ["model.layers.0", "model.layers", "model", ""]
    assert containers("model") == [""]
    assert containers("") == []


def test_a_path_is_within_itself_and_its_containers_and_not_within_a_path_that_only_shares_its_letters():
    assert is_within("layers.1.attn", {"layers.1.attn"})
    assert is_within("layers.1.attn", {"layers"})
    assert is_within("layers.1.attn", {""})
    assert not is_within("layers.10.attn", {"layers.1"})
    assert is_inside("layers.1.attn", "layers.1")
    assert is_inside("layers.1.attn", "")
    assert not is_inside("layers.10.attn", "layers.1")
    assert not is_inside("layers.1", "layers.1")
