"""Whether graphs may be compiled anew: told by torch's limit, and by what the user asked for."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from hdi_callback.attention import compiled
from hdi_callback.attention.compiled import is_compiling_allowed, may_recompile


@pytest.fixture
def config(monkeypatch):
    """Torch compiles, and may compile a function eight times."""
    config = SimpleNamespace(recompile_limit=8, error_on_recompile=False)
    frames = SimpleNamespace(_stance=SimpleNamespace(stance="default"))
    monkeypatch.setitem(sys.modules, "torch._dynamo.eval_frame", frames)
    monkeypatch.setitem(sys.modules, "torch._dynamo.config", config)
    return config


@pytest.mark.parametrize(
    ("graphs", "has_both", "expected"), [(4, False, True), (5, False, False), (7, True, True), (8, True, False)]
)
def test_graphs_of_both_kinds_must_be_within_the_limit_of_recompilations(
    config, monkeypatch, graphs, has_both, expected
):
    monkeypatch.setattr(compiled, "_graphs", lambda model: graphs)
    assert may_recompile(None, has_both=has_both) is expected


def test_where_nothing_was_compiled_or_torch_does_not_tell_they_may(config, monkeypatch):
    def fail(model):
        raise AttributeError("input_codes")

    monkeypatch.setattr(compiled, "_graphs", fail)
    assert may_recompile(None) is True
    monkeypatch.delitem(sys.modules, "torch._dynamo.eval_frame")
    monkeypatch.setattr(compiled, "_graphs", lambda model: 1000)
    assert may_recompile(None) is True


@pytest.mark.parametrize(
    ("stance", "allowed"), [("default", True), ("eager_then_compile", True), ("fail_on_recompile", False)]
)
def test_a_stance_against_recompilation_is_followed(config, monkeypatch, stance, allowed):
    monkeypatch.setattr(compiled, "_graphs", lambda model: 0)
    sys.modules["torch._dynamo.eval_frame"]._stance.stance = stance
    assert is_compiling_allowed() is allowed
    assert may_recompile(None) is allowed
    config.error_on_recompile = True
    assert is_compiling_allowed() is False
