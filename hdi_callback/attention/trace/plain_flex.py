"""Torch's `flex_attention` in a traced run: plain attention, which the graph shows.

What `score_mod` makes of a score it makes of that one alone, and a mask only hides: neither moves features between
heads. Nothing is compiled meanwhile, and nothing that was compiled is asked.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_NAMES = ("_validate_device", "flex_attention_hop", "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG")


@contextmanager
def without_kernels() -> Iterator[None]:
    """Let `flex_attention` of this thread run as `scaled_dot_product_attention`, and what is compiled as it is written.

    Yields:
        Nothing.
    """
    flex: Any = sys.modules.get("torch.nn.attention.flex_attention")
    if flex is None or any(not hasattr(flex, name) for name in _NAMES):  # of an earlier torch, which is left as it is
        yield
        return
    thread = threading.get_ident()
    validate, kernel, _ = known = tuple(getattr(flex, name) for name in _NAMES)

    def validated(*args: Any) -> None:
        if threading.get_ident() != thread:
            validate(*args)

    def attended(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return kernel(query, key, value, *args, **kwargs)
        made = F.scaled_dot_product_attention(query, key, value, enable_gqa=query.shape[-3] != key.shape[-3])
        sizes = query.new_zeros(query.shape[:-1])
        return made, sizes, sizes

    with torch.compiler.set_stance("force_eager"):
        _set(flex, (validated, attended, True))
        try:
            yield
        finally:
            _set(flex, known)


def _set(flex: Any, values: Iterable[Any]) -> None:
    for name, value in zip(_NAMES, values):
        setattr(flex, name, value)
