"""Models of timm: the smallest of each of its files, and some more that have attention of their own.

They are built with as few layers, and run on pictures as small, as they allow.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

PREFIX = "timm."
# What is small by its name, the smallest first.
_SMALL = ["atto", "femto", "pico", "nano", "xxs", "xxtiny", "ti_", "tiny", "xs", "m0", "s0", "b0", "micro", "mini",
          "small", "s1", "_s", "050"]  # fmt: skip
# Those whose attention is another than that of the smallest in their file.
_OTHERS = [
    "botnet26t_256", "lamhalobotnet50ts_256", "eca_halonext26ts", "sebotnet33ts_256", "resnet50_clip",
    "coatnet_pico_rw_224", "flexivit_small", "levit_128s", "levit_conv_128s", "mobilenetv4_hybrid_medium",
    "mvitv2_tiny_cls", "swin_tiny_patch4_window7_224", "twins_pcpvt_small", "vit_dlittle_patch16_reg1_gap_256",
    "vit_medium_patch16_rope_reg1_gap_256", "vit_base_patch16_siglip_gap_224", "vit_base_patch16_siglip_224",
    "vit_small_patch16_18x2_224", "vit_small_patch16_dinov3", "vit_small_patch16_rope_224",
    "vit_srelpos_small_patch16_224", "vit_pe_core_tiny_patch16_384", "beitv2_base_patch16_224", "convit_tiny",
    "deit3_small_patch16_224", "deit_tiny_distilled_patch16_224", "xcit_tiny_12_p16_224", "swinv2_cr_tiny_ns_224",
    "vit_base_mci_224", "maxxvit_rmlp_nano_rw_256",
]  # fmt: skip
_WIDTHS = {"embed_dim": 64, "num_heads": 4}
# What is tried to make a model small: what it does not take is left away.
_SHRUNKEN: list[dict[str, Any]] = [
    {"img_size": 64, "depth": 2, **_WIDTHS},
    {"img_size": 64, "depth": 2},
    {"img_size": 64, "depths": (1, 1, 1, 1)},
    {"img_size": 64, "stages": (1, 1, 1, 1)},
    {"depths": (1, 1, 1, 1)},
    {"img_size": 64},
    {"depth": 2},
    {"stages": (1, 2, 1, 1), "global_att_blocks": (2,), "embed_dim": 32},  # HieraDet
    {},
]
_LARGEST = 1e8


def is_here() -> bool:
    """Tell whether timm is installed."""
    return importlib.util.find_spec("timm") is not None and importlib.util.find_spec("torchvision") is not None


def declare_operators() -> None:
    """Let torchvision be imported beside a torch for which it was not compiled: what it declares itself is not run."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT.append(library)


_KEPT: list[Any] = []


def names() -> list[str]:
    """List the models."""
    import timm

    def size(name: str) -> tuple[int, int, str]:
        return next((i for i, part in enumerate(_SMALL) if part in name), len(_SMALL)), len(name), name

    smallest = [min(timm.list_models(module=module), key=size) for module in timm.list_modules()]
    known = set(timm.list_models())
    return [PREFIX + name for name in sorted({*smallest, *(name for name in _OTHERS if name in known)})]


def build(name: str) -> tuple[nn.Module, Callable[[nn.Module, int], Any]]:
    """Build a small model with random weights, and what runs it with pictures for a batch."""
    import timm

    from tests.attention.sweep.architectures import randomized

    last: Exception | None = None
    for changes in _SHRUNKEN:
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in timm.create_model(name.removeprefix(PREFIX), **changes).parameters())
            if size > _LARGEST:
                raise ValueError(f"{size} parameters")
            torch.manual_seed(0)
            model = randomized(timm.create_model(name.removeprefix(PREFIX), **changes))
            return model, _run(model, changes)
        except Exception as error:  # noqa: PERF203
            last = error
    assert last is not None
    raise last


def _run(model: Any, changes: dict[str, Any]) -> Callable[[nn.Module, int], Any]:
    """Find the smallest pictures that a model takes."""
    *_, height, width = model.default_cfg.get("input_size", (3, 224, 224))
    sizes = [changes["img_size"]] if "img_size" in changes else []
    first: Exception | None = None
    for size in [*sizes, 64, 96, 128, 192, 256, (height, width)]:
        shape = (3, size, size) if isinstance(size, int) else (3, *size)
        try:
            with torch.no_grad():
                model(torch.randn(2, *shape))
        except Exception as error:
            first = first or error
        else:
            generator = torch.Generator().manual_seed(2)
            return lambda model, batch: model(torch.randn(batch, *shape, generator=generator))
    assert first is not None
    raise first


def has_attention(model: nn.Module) -> bool:
    """Tell by the names of classes whether running a model is of any use."""
    return any(re.search(r"(?i)attn|attention|xca|mla|mhsa", type(module).__name__) for module in model.modules())
