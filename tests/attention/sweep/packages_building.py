"""What the examples of packages are made with."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn

Build = Callable[[], nn.Module]


@dataclass(frozen=True)
class Example:
    """A model of a package, what it is given, and how it is called."""

    build: Build
    inputs: Callable[[int], tuple[Any, ...]]
    call: Callable[..., Any] | None = None
    attends: bool = True  # it has a softmax over tokens, by its sources; no other way may call it no attention


def noise(*shape: int) -> Callable[[int], tuple[Tensor, ...]]:
    def made(batch: int) -> tuple[Tensor, ...]:
        return (torch.randn(batch, *shape, generator=torch.Generator().manual_seed(2)),)

    return made


def two(first: tuple[int, ...], second: tuple[int, ...]) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda batch: (
        *noise(*first)(batch),
        torch.randn(batch, *second, generator=torch.Generator().manual_seed(3)),
    )


def tokens(length: int, most: int = 60) -> Callable[[int], tuple[Tensor, ...]]:
    def made(batch: int) -> tuple[Tensor, ...]:
        return (torch.randint(1, most, (batch, length), generator=torch.Generator().manual_seed(2)),)

    return made


def make(module: str, name: str, *args: Any, **options: Any) -> Build:
    def build() -> nn.Module:
        return getattr(importlib.import_module(module), name)(*args, **options)

    return build


def x_decoder(**options: Any) -> Build:
    def build() -> nn.Module:
        from x_transformers import Decoder, TransformerWrapper

        decoder = Decoder(dim=32, depth=1, heads=4, attn_dim_head=8, **options)
        return TransformerWrapper(num_tokens=64, max_seq_len=16, attn_layers=decoder)

    return build


def vit(module: str, name: str = "ViT", **more: Any) -> Build:
    sizes = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 48}
    return make(f"vit_pytorch.{module}", name, **(sizes | more))


def let_miss(*missing: str) -> None:
    """Let a package be imported beside what it imports and what no attention needs: sound, data sets, genomes."""
    for name in missing:
        if name not in sys.modules and ("." in name or importlib.util.find_spec(name) is None):
            sys.modules[name] = MagicMock(__version__="2.11.0", __spec__=ModuleSpec(name, None), __path__=[])


class _Missing:
    """Finds everything in packages that are missing."""

    def __init__(self) -> None:
        self.roots: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.partition(".")[0] in self.roots else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> Any:
        return MagicMock(__version__="2.11.0", __spec__=spec, __path__=[])

    def exec_module(self, module: Any) -> None:
        """There is nothing to run."""


_MISSING = _Missing()


def let_miss_whole(*roots: str) -> None:
    """Let packages be missing with all that is in them."""
    if _MISSING not in sys.meta_path:
        sys.meta_path.append(_MISSING)  # type: ignore[arg-type]
    _MISSING.roots.update(roots)


def without(build: Build, *roots: str) -> Build:
    """Build where packages may be missing with all that is in them."""

    def built() -> nn.Module:
        let_miss_whole(*roots)
        return build()

    return built


def beside(build: Build, *missing: str) -> Build:
    def built() -> nn.Module:
        let_miss(*missing)
        return build()

    return built


def without_start(build: Build, *packages: str) -> Build:
    """Build with parts of packages whose own start asks for files of the network, or for much that is missing."""

    def built() -> nn.Module:
        for package in packages:
            spec = None if package in sys.modules else importlib.util.find_spec(package)
            if spec is not None:
                sys.modules[package] = ModuleType(package)
                sys.modules[package].__path__ = list(spec.submodule_search_locations or ())
        return build()

    return built


def unscripted(build: Build) -> Build:
    """Let functions run that torch.jit.script would compile: the witness follows no product through these."""

    def built() -> nn.Module:
        state: Any = importlib.import_module("torch.jit._state")
        state.disable()
        try:
            return build()
        finally:
            state.enable()

    return built
