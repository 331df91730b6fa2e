"""Torch's `flex_attention` in a traced run: plain attention, which the graph shows.

`score_mod` changes each score by itself, and a mask only hides keys: neither moves features between heads. Nothing
is compiled meanwhile, and no compiled code runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hdi_callback.attention.trace.replaced import in_this_thread, replaced

_NAMES = ("_validate_device", "flex_attention_hop", "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG")


@contextmanager
def without_kernels() -> Iterator[None]:
    """Run `flex_attention` of this thread as `scaled_dot_product_attention`, and compiled code as it is written.

    Yields:
        Nothing.
    """
    flex: Any = sys.modules.get("torch.nn.attention.flex_attention")
    if flex is None or any(not hasattr(flex, name) for name in _NAMES):  # of an earlier torch, which is left as it is
        yield
        return
    validate, kernel, _ = (getattr(flex, name) for name in _NAMES)
    values = in_this_thread(validate, lambda *_: None), in_this_thread(kernel, _attended), True
    with torch.compiler.set_stance("force_eager"), replaced(*((flex, *place) for place in zip(_NAMES, values))):
        yield


def _attended(kernel: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    made = F.scaled_dot_product_attention(query, key, value, enable_gqa=query.shape[-3] != key.shape[-3])
    sizes = query.new_zeros(query.shape[:-1])
    return made, sizes, sizes
