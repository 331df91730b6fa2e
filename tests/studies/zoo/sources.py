"""What is examined: small models with random weights, and forwards of them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.studies.zoo import configs, inputs, packages

Example = tuple[nn.Module, Callable[[], object]]


def names(source: str) -> list[str]:
    """List what a source has: `timm` one model for each of its files, the smallest."""
    if source == "transformers":
        return list(configs.architectures())
    if source == "packages":
        return [f"packages.{name}" for name in packages.RECIPES]
    try:
        import timm
    except Exception:  # torchvision may be there for another torch
        return []
    return sorted(f"timm.{min(timm.list_models(module=one), key=_size_by_name)}" for one in timm.list_modules())


def examples(name: str) -> Iterator[Example]:
    """Give models with forwards to try, the likeliest first."""
    source, _, own = name.partition(".")
    if source == "packages":
        yield packages.example(own)
    elif source == "timm":
        yield from _of_timm(own)
    else:
        for model, _ in zip(configs.variants(name), range(3)):
            for given, _ in zip(inputs.for_model(model, 2), range(30)):
                yield model, partial(model, **given)


# timm

_SMALL = ["atto", "femto", "pico", "nano", "xxs", "xxtiny", "ti_", "tiny", "xs", "m0", "s0", "b0", "micro", "mini",
          "small", "s1", "_s", "050"]  # fmt: skip
_ATTENTION = re.compile("(?i)attn|attention|xca|mla|mhsa|mqa|shsa|shma")
_WIDTHS = {"embed_dim": 64, "num_heads": 4}
_SHRUNKEN: list[dict[str, Any]] = [
    {"img_size": 64, "depth": 2, **_WIDTHS}, {"img_size": 64, "depth": 2}, {"img_size": 64, "depths": (1, 1, 1, 1)},
    {"depths": (1, 1, 1, 1)}, {"img_size": 64}, {"depth": 2}, {},
]  # fmt: skip


def _size_by_name(name: str) -> tuple[int, int, str]:
    return next((i for i, part in enumerate(_SMALL) if part in name), len(_SMALL)), len(name), name


def _of_timm(name: str) -> Iterator[Example]:
    import timm

    for changes in _SHRUNKEN:
        with contextlib.suppress(Exception):
            with torch.device("meta"):
                size = sum(one.numel() for one in timm.create_model(name, **changes).parameters())
            if size > 1e8:
                continue
            torch.manual_seed(0)
            model = configs.randomized(timm.create_model(name, **changes))
            if not any(_ATTENTION.search(type(one).__name__) for one in model.modules()):
                yield model, lambda: None
            for side in dict.fromkeys([changes.get("img_size", 64), 96, 128, 192, model.default_cfg["input_size"][-1]]):
                x = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(2))
                for one in model.modules():
                    if isinstance(one, nn.modules.batchnorm._BatchNorm):
                        one.momentum = 1.0
                with contextlib.suppress(Exception), torch.no_grad():
                    model.train()(x)  # running statistics, without which what deep models compute grows and grows
                model.eval()
                yield model, lambda model=model, x=x: model(x)
