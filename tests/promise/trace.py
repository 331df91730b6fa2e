"""What is kept of a training, to be compared with the same training without the monitor."""

from __future__ import annotations

import hashlib
import random
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from hdi_callback.errors import HDIWarning
from tests.promise.traits import AUXILIARY, CALLS, Counted

_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
_GLOBAL_HOOKS = (
    "_global_backward_hooks", "_global_backward_pre_hooks", "_global_forward_hooks", "_global_forward_pre_hooks",
    "_global_buffer_registration_hooks", "_global_module_registration_hooks", "_global_parameter_registration_hooks",
)  # fmt: skip


class Trace:
    """Named values, in the order in which they came."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.readings = 0
        self.measurements = 0  # of layers, in all readings
        self.said: list[str] = []  # warnings of the package

    def keep(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            value = (float(value.detach()), digest(value)) if value.numel() == 1 else digest(value)
        assert name not in self.values, name
        self.values[name] = value

    def differences(self, other: Trace, among: Trace | None = None) -> list[str]:
        """Say what differs, the first first; of what a third differs in as well, if there is one."""
        found = []
        for name in dict.fromkeys([*self.values, *other.values]):
            mine, theirs = self.values.get(name, "absent"), other.values.get(name, "absent")
            if mine != theirs and (among is None or among.values.get(name, "absent") != theirs):
                found.append(f"{name}: {_shown(mine, theirs)}")
        return found


def _shown(alone: Any, watched: Any) -> str:
    if isinstance(alone, dict) and isinstance(watched, dict):
        names = [name for name in dict.fromkeys([*alone, *watched]) if alone.get(name) != watched.get(name)]
        parts = [f"{name} {_shown(alone.get(name), watched.get(name))}" for name in names]
    elif isinstance(alone, list) and isinstance(watched, list):
        parts = [f"only alone {[x for x in alone if x not in watched]!r}"] * any(x not in watched for x in alone)
        parts += [f"only watched {[x for x in watched if x not in alone]!r}"] * any(x not in alone for x in watched)
        parts = parts or ["in another order"]
    else:
        parts = [f"{alone!r} alone, {watched!r} watched"]
    return "; ".join(parts)[:600]


def digest(tensor: Tensor) -> str:
    """Give what two tensors have in common only if they are equal, bit by bit."""
    if tensor.is_meta or isinstance(tensor, nn.parameter.UninitializedTensorMixin):
        return f"{type(tensor).__name__} on {tensor.device}"
    flat = tensor.detach().cpu().contiguous()
    content = flat.reshape(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.blake2b(content, digest_size=8).hexdigest()}"


def digests(value: Any) -> Any:
    """Replace tensors in nested data by their digests."""
    if isinstance(value, Tensor):
        return digest(value)
    if isinstance(value, dict):
        return {str(name): digests(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [digests(item) for item in value]
    return repr(value)


def random_states(model: nn.Module) -> dict[str, str]:
    """Describe every random state there is."""
    name, keys, *rest = np.random.get_state()  # noqa: NPY002 - the state that everybody shares is the point
    states = {
        "torch": digest(torch.get_rng_state()),
        "python": hashlib.blake2b(repr(random.getstate()).encode(), digest_size=8).hexdigest(),
        "numpy": hashlib.blake2b(repr((name, keys.tolist(), rest)).encode(), digest_size=8).hexdigest(),
    }
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Generator):
                states[f"{path}.{attribute}"] = digest(value.get_state())
    return states


_Setting = tuple[Callable[[], Any], Callable[[Any], Any]]


def _attribute(owner: Any, name: str) -> _Setting:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


_cuda, _cudnn = torch.backends.cuda, torch.backends.cudnn
_SETTINGS: dict[str, _Setting] = {
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "autocast on the CPU": (lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)),
    "autocast on CUDA": (lambda: torch.is_autocast_enabled("cuda"), lambda on: torch.set_autocast_enabled("cuda", on)),
    "cache of autocast": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    "type of autocast": (lambda: torch.get_autocast_dtype("cpu"), lambda kind: torch.set_autocast_dtype("cpu", kind)),
    "deterministic algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "anomaly detection": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "default type": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (torch.get_default_device, torch.set_default_device),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "fast path": (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    "cudnn": _attribute(_cudnn, "enabled"),
    "cudnn benchmark": _attribute(_cudnn, "benchmark"),
    "cudnn deterministic": _attribute(_cudnn, "deterministic"),
    "cudnn tf32": _attribute(_cudnn, "allow_tf32"),
    "flash attention": (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    "memory-efficient attention": (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    "plain attention": (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    "cudnn attention": (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    "numpy errors": (np.geterr, lambda kinds: np.seterr(**kinds)),
}


def surroundings() -> dict[str, Any]:
    """Describe what is set for the whole process."""
    return {
        **{name: read() for name, (read, _) in _SETTINGS.items()},
        "inference mode": torch.is_inference_mode_enabled(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "function modes": len(torch.overrides._get_current_function_mode_stack()),
        "dispatch modes": len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()),
        "hooks on saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
        "global hooks": {name: len(getattr(torch_module, name)) for name in _GLOBAL_HOOKS},
        "warning filters": len(warnings.filters),
    }


@contextmanager
def settings_kept() -> Iterator[None]:
    """Put back what is set for the whole process, so that what one training leaves does not reach the next."""
    kept = {name: read() for name, (read, _) in _SETTINGS.items() if name != "default device"}
    try:
        yield
    finally:
        for name, value in kept.items():
            read, write = _SETTINGS[name]
            if read() != value:
                write(value)


def of_modules(model: nn.Module, *, is_watched: bool = False) -> dict[str, Any]:
    """Describe all of a model but its numbers and hooks; and while it is watched, but a forward in a class's place."""
    passed_over = (*_HOOKS, "forward") if is_watched else _HOOKS
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        found[f"type of {path!r}"] = type(module).__name__
        found[f"mode of {path!r}"] = "training" if module.training else "evaluation"
        found[f"attributes of {path!r}"] = sorted(name for name in vars(module) if name not in passed_over)
        found[f"buffers of {path!r}"] = list(module._buffers)
        found[f"what trains of {path!r}"] = [name for name, one in module._parameters.items() if _trains(one)]
    return found


def _trains(parameter: Tensor | None) -> bool:
    return parameter is not None and parameter.requires_grad


def hooks_of(model: nn.Module) -> dict[str, int]:
    """Count the hooks that a forward or a backward would call."""
    return {
        path: count
        for path, module in model.named_modules()
        if (count := sum(len(getattr(module, name, None) or ()) for name in _HOOKS))
    }


def calls() -> dict[str, int]:
    """Count the calls of the user's functions and what they left."""
    return {**CALLS, "Counted.count": Counted.count, "auxiliary losses": len(AUXILIARY)}


# --- spies

_SEEDING = {
    "torch.manual_seed": (torch, "manual_seed"),
    "torch.random.manual_seed": (torch.random, "manual_seed"),
    "torch.seed": (torch, "seed"),
    "torch.cuda.manual_seed": (torch.cuda, "manual_seed"),
    "torch.cuda.manual_seed_all": (torch.cuda, "manual_seed_all"),
    "torch.cuda.seed_all": (torch.cuda, "seed_all"),
    "torch.cuda.set_rng_state": (torch.cuda, "set_rng_state"),
    "torch.mps.manual_seed": (torch.mps, "manual_seed"),
    "torch.xpu.manual_seed_all": (torch.xpu, "manual_seed_all"),
    "random.seed": (random, "seed"),
    "numpy.random.seed": (np.random, "seed"),
    "torch.cuda.synchronize": (torch.cuda, "synchronize"),
}
_KERNELS = {
    "fast path of an encoder layer": (torch, "_transformer_encoder_layer_fwd"),
    "fast path of attention": (torch, "_native_multi_head_attention"),
}


@contextmanager
def spying() -> Iterator[Counter[str]]:
    """Count the calls of functions that seed generators for everybody, and of kernels that hooks switch off."""
    counts: Counter[str] = Counter()
    with ExitStack() as stack:
        for name, (owner, attribute) in {**_SEEDING, **_KERNELS}.items():
            real = getattr(owner, attribute)

            def spy(*args: Any, real: Any = real, name: str = name, **kwargs: Any) -> Any:
                counts[name] += 1
                return real(*args, **kwargs)

            stack.enter_context(mock.patch.object(owner, attribute, spy))
        yield counts


@contextmanager
def listening(trace: Trace) -> Iterator[None]:
    """Collect warnings: those of the package apart from all others."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    trace.said = [str(item.message) for item in caught if issubclass(item.category, HDIWarning)]
    others = Counter(
        f"{item.category.__name__}: {re.sub(r'0x[0-9a-f]+|/tmp/[^ ]*|[0-9.]+', '', str(item.message))[:200]}"
        for item in caught
        if not issubclass(item.category, HDIWarning)
    )
    trace.keep("warnings of others", sorted(others))
