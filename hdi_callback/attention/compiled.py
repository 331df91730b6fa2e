"""Limits of `torch.compile`: whether a graph may be recompiled without harm."""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any

from torch import nn


def may_recompile(model: nn.Module | None, *, has_both: bool = False) -> bool:
    """Return whether the graphs of a model may be compiled once more.

    They may not under `torch.compiler.set_stance("fail_on_recompile")` and its like, and not where that could reach the
    limit of recompilations, at which a model runs uncompiled, or training ends under ``fullgraph=True``.

    Args:
        model: the model.
        has_both: whether there are graphs of both kinds already, so that not all of them come in addition.

    Returns:
        False if a setting forbids it.
    """
    if "torch._dynamo.eval_frame" not in sys.modules:
        return True
    if not is_compiling_allowed():
        return False
    config: Any = sys.modules.get("torch._dynamo.config")
    limit = getattr(config, "recompile_limit", getattr(config, "cache_size_limit", 8))
    try:
        graphs = _graphs(model)
        return graphs + (1 if has_both else graphs) <= int(limit)
    except Exception:  # of torch's inner parts, which change from version to version
        return True


def is_compiling_allowed() -> bool:
    """Return whether torch may compile anything now.

    Returns:
        False under `torch.compiler.set_stance("fail_on_recompile")` and its like; nothing is imported for it.
    """
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    stance = getattr(getattr(frames, "_stance", None), "stance", "default")
    if stance not in ("default", "eager_then_compile", "aot_eager_then_compile"):
        return False
    return not getattr(sys.modules.get("torch._dynamo.config"), "error_on_recompile", False)


def is_backward_compiled() -> bool:
    """Return whether compiled autograd runs the backward, which a hook on a tensor would have compiled anew.

    Returns:
        False where nothing of it was imported.
    """
    engine: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(engine, "compiled_autograd_enabled", False))


def _graphs(model: nn.Module | None) -> int:
    """The largest number of graphs that any part of a model has."""
    from torch._dynamo.convert_frame import input_codes
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    codes = [code for ref in list(input_codes.seen) if (code := ref() if callable(ref) else ref) is not None]
    kinds = {type(module).forward for module in (model.modules() if model is not None else ())}
    files = {code.co_filename for kind in kinds if isinstance(code := getattr(kind, "__code__", None), CodeType)}
    counts = {code: len(_debug_get_cache_entry_list(code)) for code in codes}
    its_own = [count for code, count in counts.items() if code.co_filename in files and count]
    return max(its_own or counts.values(), default=0)
