"""Whether graphs may be compiled anew: told by torch's limit, and by what the user asked for."""

from __future__ import annotations

import sys
import weakref
from types import SimpleNamespace

import pytest
from torch import nn

from hdi_callback.attention import compiled
from hdi_callback.attention.compiled import is_compiling_allowed, may_recompile


class One(nn.Module):
    def forward(self):
        pass


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
def test_recompilation_is_allowed_if_the_graphs_with_and_without_capture_stay_within_the_limit(
    config, monkeypatch, graphs, has_both, expected
):
    monkeypatch.setattr(compiled, "_graphs", lambda model: graphs)
    assert may_recompile(None, has_both=has_both) is expected


def test_recompilation_is_allowed_if_nothing_was_compiled_or_the_count_is_unavailable(config, monkeypatch):
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


def elsewhere():
    names: dict = {}
    exec(compile("def forward(): pass", "/site-packages/library.py", "exec"), names)
    return names["forward"]


@pytest.mark.parametrize(("of_own", "expected"), [((3, 2), 3), ((0, 0), 7)])
def test_graphs_are_counted_in_the_files_of_the_model_or_in_all_files_if_these_have_none(
    config, monkeypatch, of_own, expected
):
    library = elsewhere()
    counts = {
        One.forward.__code__: of_own[0], test_a_stance_against_recompilation_is_followed.__code__: of_own[1],
        library.__code__: 7,
    }  # fmt: skip
    seen = SimpleNamespace(seen=[weakref.ref(next(iter(counts))), *list(counts)[1:], lambda: None])
    monkeypatch.setitem(sys.modules, "torch._dynamo.convert_frame", SimpleNamespace(input_codes=seen))
    frames = sys.modules["torch._dynamo.eval_frame"]
    monkeypatch.setattr(frames, "_debug_get_cache_entry_list", lambda code: [None] * counts[code], raising=False)
    assert compiled._graphs(One()) == expected
    assert compiled._graphs(None) == 7
    seen.seen.clear()
    assert compiled._graphs(One()) == 0
