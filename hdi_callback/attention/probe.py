"""Run a copy of a module with stubs in place of its linear maps.

What stubs answer is chosen by who asks; what reaches the output projection, or comes back, then tells how attention
uses the answers. The user's module, its buffers and the random state are not touched, no large matrix is copied, and
inputs that attention needs beside its tokens are made up, or are those of a real forward.
"""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

TOKENS = 8
_NORM = re.compile(r"(q|k|query|key)_?(norm|layer_?norm)$|norm_?[qk]$", re.IGNORECASE)
_SINK = re.compile("sink", re.IGNORECASE)
_INPUT_NAMES = frozenset({"q", "k", "v", "query", "key", "value", "queries", "keys", "values", "kv", "context"})


@dataclass(frozen=True)
class Arguments:
    """What a forward was given: tensors of one sequence and few tokens, and plain values.

    Attributes:
        args: by position.
        kwargs: by name.
        is_batch_first: whether the first of them is ``(batch, length, width)`` and not ``(length, batch, width)``.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    is_batch_first: bool = True


@contextmanager
def in_private(seed: int) -> Iterator[None]:
    """Keep random state, device, autocast and warnings of the user apart from what runs within.

    Args:
        seed: of the random numbers within.
    """
    with (
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
        warnings.catch_warnings(),
        _WithoutDropout(),
    ):
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        yield


class Stub(nn.Module):
    """Stands in for a linear map; only its size and type can be read.

    Args:
        features_in: features that the map takes.
        features_out: features that it gives.
    """

    def __init__(self, features_in: int, features_out: int) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = features_in, features_out, None
        self.weight = torch.empty(0)


class Answer(Stub):
    """Answers with given features for each token of the input, whatever the input is.

    Args:
        features_in: features that the map takes.
        answer: ``(batch, length, features)``.
        is_batch_first: whether it is called with the batch first.
        inner: the map for what is not a sequence of tokens; by default that is an error.
    """

    def __init__(
        self, features_in: int, answer: Tensor, *, is_batch_first: bool = True, inner: Tensor | None = None
    ) -> None:
        super().__init__(features_in, answer.shape[-1])
        self.answer = answer if is_batch_first else answer.transpose(0, 1).contiguous()
        self.is_batch_first = is_batch_first
        self.inner = inner
        self.was_called = False
        self.received: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Answer.

        Args:
            x: what the linear map would be given.

        Returns:
            What it is to give.

        Raises:
            ValueError: if this is not a sequence of tokens.
        """
        if x.dim() == 2 and x.shape[0] == self.answer[..., 0].numel():
            self._received(x.unflatten(0, self.answer.shape[:2]))
            return self.answer.flatten(0, 1).clone()
        if x.shape[:-1] != self.answer.shape[:-1]:
            if self.inner is None:
                raise ValueError("the tokens were taken apart before they were projected")
            return F.linear(x, self.inner)
        self._received(x)
        return self.answer.clone()

    def _received(self, x: Tensor) -> None:
        self.was_called = True
        self.received = x if self.is_batch_first else x.transpose(0, 1)


class ReachedError(Exception):
    """The output projection was called."""


class Receive(Stub):
    """Ends the forward with what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        """End the forward.

        Args:
            x: what the linear map would be given.

        Raises:
            ReachedError: always, with `x`.
        """
        raise ReachedError(x)


@dataclass
class Run:
    """What came of one forward of a copy.

    Attributes:
        output: what reached the `Receive` stub, or the first of what came back.
        passed: modules of the copy that have no stub within, by their names: what they were given, and gave.
    """

    output: Any
    passed: dict[str, tuple[Tensor, Tensor, nn.Module]] = field(default_factory=dict)


def run_copy(
    module: nn.Module,
    stubs: Mapping[nn.Module, Stub],
    *,
    batch: int,
    width: int,
    rotary: int,
    given: Arguments | None = None,
    is_batch_first: bool = True,
    is_traced: bool = False,
) -> Run:
    """Copy a module with stubs in it, and run it once.

    Args:
        module: the module.
        stubs: what stands in for which of the modules within.
        batch: sequences.
        width: features of the tokens that are made up.
        rotary: features of the rotation that is made up.
        given: inputs of a real forward, in place of those that are made up.
        is_batch_first: whether tokens are made up as ``(batch, length, width)``.
        is_traced: note what the modules without a stub within were given and gave.

    Returns:
        What came of it.
    """
    memo: dict[int, Any] = {id(linear): stub for linear, stub in stubs.items()}  # taken for copied already
    trial = copy.deepcopy(module, memo).eval()
    for part in trial.modules():
        _make_plain(part)
    dtype = torch.float32
    trial.to(device="cpu", dtype=dtype)
    for name, parameter in trial.named_parameters():  # what is the identity at first, or zero, does not stay so
        with torch.no_grad():
            if _SINK.search(name):
                parameter.fill_(-1e4)
            else:
                parameter.uniform_(0.5, 1.5)
        parameter.requires_grad_(False)
    run = Run(None)
    if is_traced:
        _trace(trial, run)
    if given is None:
        x = torch.randn(batch, TOKENS, width)[:1].expand(batch, -1, -1)
        x = x if is_batch_first else x.transpose(0, 1)
        args, kwargs = (x,), _other_inputs(trial.forward, x, rotary)
    else:
        args, kwargs = ((_repeated(part, batch, given.is_batch_first)) for part in (given.args, dict(given.kwargs)))
    try:
        output = trial.forward(*args, **kwargs)
    except ReachedError as reached:
        (output,) = reached.args
    run.output = output[0] if isinstance(output, tuple) else output
    return run


def by_token(output: Any, batch: int, is_batch_first: bool) -> Tensor | None:
    """Bring what came of a forward into one shape.

    Args:
        output: ``(batch, length, features)``, the same with the length first, or ``(batch * length, features)``.
        batch: sequences.
        is_batch_first: which of them it is.

    Returns:
        ``(batch, length, features)``; `None` if it is something else.
    """
    if not isinstance(output, Tensor):
        return None
    if output.dim() == 2 and output.shape[0] % batch == 0:
        output = output.unflatten(0, (batch, -1) if is_batch_first else (-1, batch))
    if output.dim() != 3:
        return None
    output = output if is_batch_first else output.transpose(0, 1)
    return output if output.shape[0] == batch else None


class _WithoutDropout(TorchFunctionMode):
    """Leave out dropout where a forward applies it in evaluation as well, as much code does by mistake."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (F.dropout, torch.dropout):
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            # query, key, value, mask, and the probability of dropout
            args = args[:4] + ((0.0,) if len(args) > 4 else ()) + args[5:]
            if "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


def _make_plain(module: nn.Module) -> None:
    """Take off what needs a GPU, calls back to the user, or mixes heads in a way that leaves them in place."""
    module._forward_hooks.clear()
    module._forward_pre_hooks.clear()
    config: Any = module.__dict__.get("config")
    if hasattr(config, "_attn_implementation"):
        config._attn_implementation = "eager"  # the config is a copy as well
    for name, child in module.named_children():
        # A norm over all heads only scales each of them.
        if _NORM.match(name) and "norm" in type(child).__name__.lower():
            setattr(module, name, nn.Identity())


def _trace(trial: nn.Module, run: Run) -> None:
    for name, part in trial.named_modules():
        if part is trial or any(isinstance(inner, Stub) for inner in part.modules()):
            continue

        def note(part: nn.Module, args: Any, output: Any, name: str = name) -> None:
            if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
                run.passed[name] = (args[0], output, part)

        part.register_forward_hook(note)


def _repeated(value: Any, batch: int, is_batch_first: bool) -> Any:
    """Give tensors of one sequence to every element of the batch."""
    if isinstance(value, Tensor):
        value = value.detach().to(device="cpu", dtype=torch.float32 if value.is_floating_point() else None)
        place = 0 if is_batch_first else 1
        if value.dim() >= 2 + place and value.shape[place] == 1:
            return value.expand(*(batch if dim == place else -1 for dim in range(value.dim())))
        return value
    if isinstance(value, (tuple, list)):
        return type(value)(_repeated(item, batch, is_batch_first) for item in value)
    if isinstance(value, dict):
        return {name: _repeated(item, batch, is_batch_first) for name, item in value.items()}
    return value


def _other_inputs(forward: Any, x: Tensor, rotary: int) -> dict[str, Any]:
    """Make up the inputs that a forward needs beside its first: no mask, no cache, no rotation, the same tokens."""
    others: dict[str, Any] = {}
    for parameter in list(inspect.signature(forward).parameters.values())[1:]:
        name = parameter.name
        if name == "position_embeddings":
            others[name] = (torch.ones(1, TOKENS, rotary), torch.zeros(1, TOKENS, rotary))
        elif parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            continue
        elif name in _INPUT_NAMES:
            others[name] = x
        else:
            others[name] = None
    return others
