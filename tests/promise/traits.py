"""Code of the user's that draws, counts, keeps or changes while a model runs, put on the model of a training."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrizations, parametrize

from tests.promise.models import HEADS, WIDTH, Attention, Network, frozen_encoder
from tests.promise.plan import HAND_WRITTEN, Training

CALLS: Counter[str] = Counter()
"""How often every function of the user's was called."""

AUXILIARY: list[Tensor] = []
"""What modules add to the loss; the training step takes it from here."""


def reset() -> None:
    """Forget what the last training left."""
    CALLS.clear()
    AUXILIARY.clear()
    Counted.count = 0


# --- modules, for the forward of attention; of attention that is not written here they follow its linear maps


class Extra(nn.Module):
    """Changes the features a little while training, by what it draws."""

    def draw(self) -> float:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        CALLS[type(self).__name__] += 1
        drawn = self.draw()  # in every mode
        return x * (1 + 0.1 * drawn) if self.training else x


class DrawsOfTorch(Extra):
    def forward(self, x: Tensor) -> Tensor:
        CALLS[type(self).__name__] += 1
        return x + 0.01 * torch.randn_like(x) if self.training else x


class DrawsOfPython(Extra):
    def draw(self) -> float:
        return random.random()


class DrawsOfNumpy(Extra):
    def draw(self) -> float:
        return float(np.random.random())  # noqa: NPY002 - the state that everybody shares is the point


class DrawsOfAGenerator(Extra):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def draw(self) -> float:
        return float(torch.rand((), generator=self.generator))


class Counted(Extra):
    count = 0

    def draw(self) -> float:
        Counted.count += 1
        return 1 / Counted.count


class Auxiliary(Extra):
    def forward(self, x: Tensor) -> Tensor:
        CALLS[type(self).__name__] += 1
        AUXILIARY.append(0.01 * x.float().square().mean())
        return x


class FeatureNorm(nn.BatchNorm1d):
    """Batch norm of the features of all tokens."""

    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Follows(nn.Module):
    """Runs an extra behind a module in place of the module."""

    def __init__(self, inner: nn.Module, extra: nn.Module) -> None:
        super().__init__()
        self.inner, self.extra = inner, extra

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.extra(self.inner(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:  # some ask a dropout for its probability
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class NoisyLinear(nn.Linear):
    """A linear map with noise on its weights while it trains."""

    def forward(self, x: Tensor) -> Tensor:
        CALLS["NoisyLinear"] += 1
        noise = 0.01 * torch.randn_like(self.weight) if self.training else torch.zeros(())
        return F.linear(x, self.weight + noise.to(self.weight.dtype), self.bias)


class CountingParametrization(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        CALLS["parametrization"] += 1
        return weight * (1 + 0.001 * CALLS["parametrization"])


class DrawingParametrization(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, weight: Tensor) -> Tensor:
        if not self.training:
            return weight
        self.count += 1
        return weight + 0.01 * torch.randn_like(weight) / self.count


# --- hooks of the user's


def _hook(name: str) -> Callable[..., None]:
    def count(*args: Any) -> None:
        CALLS[name] += 1

    return count


def count_before(module: nn.Module, args: Any) -> None:
    CALLS["forward pre-hook"] += 1


def count_before_with_names(module: nn.Module, args: Any, kwargs: Any) -> None:
    CALLS["forward pre-hook with kwargs"] += 1


def count_after(module: nn.Module, args: Any, output: Any) -> None:
    CALLS["forward hook"] += 1


def count_backward(module: nn.Module, *gradients: Any) -> None:
    CALLS["full backward hook"] += 1


def count_before_backward(module: nn.Module, *gradients: Any) -> None:
    CALLS["full backward pre-hook"] += 1


def _count_globally() -> None:
    torch_module.register_module_forward_pre_hook(_hook("global forward pre-hook"))
    torch_module.register_module_forward_hook(_hook("global forward hook"))
    torch_module.register_module_full_backward_hook(_hook("global full backward hook"))


# --- putting them on


_EXTRAS: dict[str, type[nn.Module]] = {
    "draws of torch": DrawsOfTorch,
    "draws of python": DrawsOfPython,
    "draws of numpy": DrawsOfNumpy,
    "draws of a generator": DrawsOfAGenerator,
    "counter of a class": Counted,
    "auxiliary losses in a list": Auxiliary,
    "batch norm": FeatureNorm,
}


def decorate(model: Network, training: Training) -> None:
    """Put the traits of a training on its model, before anybody looks at it."""
    for trait, kind in _EXTRAS.items():
        if trait in training:
            _put_into_attention(model, training, kind)
    if "tied blocks" in training:
        model.blocks[1] = model.blocks[0]
    if "lazy attention" in training:
        for attention in _attention(model):
            for name in ("k_proj", "qkv"):
                if name in attention._modules:
                    setattr(attention, name, nn.LazyLinear(getattr(attention, name).out_features))
    if "lazy head" in training:
        model.head = nn.LazyLinear(5)
    _reparametrize(model, training)
    if "attention of one token" in training:
        model.pool = Attention("separate", 0.0)
    if "teacher in evaluation mode" in training:
        model.teacher = frozen_encoder()
    if "attention on meta" in training:
        with torch.device("meta"):
            model.idle = Attention("fused", 0.0)
    if "tied head" in training:
        model.head.weight = model.embed.weight
        model.head.bias = None
    _hook_up(model, training)
    if "frozen block" in training:
        model.blocks[0].requires_grad_(False)
    if "frozen attention" in training:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and "attn" not in name and "ttention" not in name)
    if "bf16 weights" in training:
        model.bfloat16()


def _reparametrize(model: Network, training: Training) -> None:
    for linear in list(_linears(model, training))[:3]:
        if isinstance(linear, nn.LazyLinear):
            continue
        if "weight noise" in training:
            linear.__class__ = NoisyLinear
        if "spectral norm" in training:
            parametrizations.spectral_norm(linear)
        if "spectral norm by hook" in training:
            nn.utils.spectral_norm(linear)
        if "weight norm" in training:
            parametrizations.weight_norm(linear)
        if "weight norm by hook" in training:
            nn.utils.weight_norm(linear)
        if "parametrization that counts" in training:
            parametrize.register_parametrization(linear, "weight", CountingParametrization())
        if "parametrization that draws" in training:
            parametrize.register_parametrization(linear, "weight", DrawingParametrization())


def _hook_up(model: Network, training: Training) -> None:
    watched = [module for name, module in model.named_modules() if "att" in name.lower()][:12]
    for module in watched:
        if "user hooks" in training:
            module.register_forward_pre_hook(count_before)
            module.register_forward_pre_hook(count_before_with_names, with_kwargs=True)
            module.register_forward_hook(count_after)
        if "backward hooks" in training:
            module.register_full_backward_hook(count_backward)
            module.register_full_backward_pre_hook(count_before_backward)
    if "global hooks" in training:
        _count_globally()


def _put_into_attention(model: Network, training: Training, kind: type[nn.Module]) -> None:
    if training.family in HAND_WRITTEN or training.family == "lora":
        for attention in _attention(model):
            attention.extras.append(kind())
        return
    model.tail.append(kind())
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            # The output projection and what is behind it, by the names of these families.
            if isinstance(child, (nn.Linear, nn.Dropout)) and name in _BEHIND_ATTENTION:
                setattr(parent, name, Follows(child, kind()))


_BEHIND_ATTENTION = ("o_proj", "o", "dense", "resid_dropout", "attn_dropout", "attention_dropout")


def _attention(model: nn.Module) -> Iterator[Attention]:
    return (module for module in model.modules() if isinstance(module, Attention) and module.num_heads == HEADS)


def _linears(model: nn.Module, training: Training) -> Iterator[nn.Linear]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "att" in name.lower():
            yield module
