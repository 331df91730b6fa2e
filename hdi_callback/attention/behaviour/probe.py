"""Run a copy of a module with stubs in place of its linear maps.

What stubs answer is chosen by who asks; what reaches the output projection, or comes back, then tells how attention
uses the answers. The user's module, its buffers and the random state are not touched, and no large matrix is copied.
Inputs are made up; a module that needs others cannot be run.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hdi_callback.attention.isolation import isolated, isolated_copy
from hdi_callback.attention.kept_lengths import kept_lengths
from hdi_callback.attention.weight_reading import read_tensor

_NORM = re.compile(r"(q|k|v|query|key|value)_?(norm|layer_?norm)$|norm_?[qkv]$", re.IGNORECASE)
_SINK = re.compile("sink", re.IGNORECASE)
_BIAS = re.compile("bias$", re.IGNORECASE)
_ROTARY_WIDTHS = (
    "qk_rope_head_dim", "rotary_dim", "rotary_ndims", "rope_dim", "head_dim", "attention_head_size", "head_size",
)  # fmt: skip
_INPUT_NAMES = frozenset({"q", "k", "v", "query", "key", "value", "queries", "keys", "values", "kv", "context"})
_ROTATIONS = ("position_embeddings", "rotary_pos_emb", "rope")
_MASKS = ("attention_mask", "mask", "attn_mask")
_POSITIONS = ("position_ids", "positions", "cache_position")
_BIASES = ("alibi", "position_bias", "attention_bias", "bias")


Shape = Literal["batch first", "length first", "in groups", "flat"]


@dataclass(frozen=True)
class MadeUp:
    """Inputs that are made up. Nothing that is claimed rests on them: where they do not fit, nothing is seen.

    Attributes:
        shape: ``(batch, length, width)``, ``(length, batch, width)``, ``(batch, 1, length, width)``, or
            ``(batch * length, width)`` with ``cu_seqlens``.
        tokens: the length.
        rotary: features of the rotation, which is none.
        is_masked: whether masks are there, of ones; `None` otherwise.
        is_biased: whether the biases of positions that a forward requires are there, of zeros; `None` otherwise.
        is_normed: whether RMS norms are left in; one behind attention hides which values come through. What a LayerNorm
            subtracts is another matter (`norms.py`), so that it stays.
        is_filled: whether other arguments that a forward requires are the tokens again; `None` otherwise.
        is_whole: nothing was cut or made up, so that which dimension numbers sequences and which tokens is not known.
    """

    shape: Shape = "batch first"
    tokens: int = 8
    rotary: int = 1
    is_masked: bool = False
    is_biased: bool = False
    is_normed: bool = True
    is_filled: bool = False
    is_whole: bool = False

    def arguments(self, forward: Any, batch: int, width: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Make the arguments of a forward.

        Args:
            forward: the method.
            batch: sequences.
            width: features of the tokens.

        Returns:
            Arguments by position and by name.
        """
        x = torch.randn(1, self.tokens, width).expand(batch, -1, -1)
        x = self.lay_out(x)
        tokens = (1, self.tokens) if self.shape != "flat" else (batch * self.tokens,)
        others: dict[str, Any] = {}
        for parameter in list(inspect.signature(forward).parameters.values())[1:]:
            name = parameter.name
            if name in _ROTATIONS:
                others[name] = (torch.ones(*tokens, self.rotary), torch.zeros(*tokens, self.rotary))
            elif name == "cu_seqlens" and self.shape == "flat":
                others[name] = torch.arange(0, batch * self.tokens + 1, self.tokens, dtype=torch.int32)
            elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            elif self.is_masked and name in _MASKS:
                others[name] = torch.ones(batch, 1, self.tokens, self.tokens)
            elif name in _POSITIONS:
                place = torch.arange(self.tokens)
                others[name] = place if name == "cache_position" else place.expand(batch, -1)
            elif parameter.default is not parameter.empty:
                continue
            elif self.is_biased and name in _BIASES:
                others[name] = torch.zeros(1, 1, 1)
            elif name in _INPUT_NAMES:
                others[name] = x
            elif name == "residual":
                others[name] = torch.zeros_like(x)
            else:
                others[name] = x if self.is_filled and name not in (*_MASKS, *_BIASES) else None
        return (x,), others

    def lay_out(self, tokens: Tensor) -> Tensor:
        """Bring tokens into the shape that the forward is given.

        Args:
            tokens: ``(batch, length, features)``.

        Returns:
            The same, in the shape of `shape`.
        """
        if self.shape == "flat":
            return tokens.flatten(0, 1)
        if self.shape == "in groups":
            return tokens[:, None]
        return tokens if self.shape == "batch first" else tokens.transpose(0, 1)

    def by_token(self, output: Any, batch: int) -> Tensor | None:
        """Bring what came of a forward back.

        Args:
            output: in the shape of `shape`, with batch and length in one, or with the length in several dimensions.
            batch: sequences.

        Returns:
            ``(batch, length, features)``; `None` if it is something else.
        """
        if not isinstance(output, Tensor) or output.dim() < 2:
            return None
        if output[..., 0].numel() != batch * self.tokens:
            return None
        if self.shape == "length first" and output.shape[0] != batch * self.tokens:
            return output.reshape(self.tokens, batch, -1).transpose(0, 1)
        return output.reshape(batch, self.tokens, -1)


def ways_to_run(module: nn.Module, rotary: int | None = None, *, with_groups: bool = False) -> Iterator[MadeUp]:
    """Give the inputs that are worth trying, the usual ones first.

    Args:
        module: the module.
        rotary: features of the rotation, if they are known.
        with_groups: try tokens in groups as well, which some modules number in a dimension of their own.

    Yields:
        One way after the other.
    """
    parameters = inspect.signature(module.forward).parameters
    names = set(parameters)
    widths = [] if rotary is None else [rotary]
    if names & set(_ROTATIONS):
        # Names are asked for no more than a size that may fit.
        for owner in (module, getattr(module, "config", None)):
            for name in _ROTARY_WIDTHS:
                with suppress(Exception):
                    widths.append(int(getattr(owner, name)))
        widths += [width // 2 for width in widths]
    widths = [width for width in dict.fromkeys([*widths, 1]) if width > 0]
    shapes: tuple[Shape, ...] = ("flat",) if "cu_seqlens" in names else ("batch first", "length first")
    lengths = dict.fromkeys([8, *kept_lengths(module, module.buffers(recurse=False))])
    masks = (False, True) if names & set(_MASKS) else (False,)
    biases = (False, True) if names & set(_BIASES) else (False,)
    norms = (True, False) if has_other_norms(module) else (True,)
    fills = (False, True) if _requires_more(list(parameters.values())) else (False,)
    choices = itertools.product(lengths, fills, masks, biases, widths, shapes, norms)
    for length, is_filled, is_masked, is_biased, width, shape, is_normed in choices:
        yield MadeUp(shape, length, width, is_masked, is_biased, is_normed, is_filled)
    if with_groups and "cu_seqlens" not in names:
        for is_filled, is_normed in itertools.product(fills, norms):
            yield MadeUp("in groups", 8, widths[0], is_normed=is_normed, is_filled=is_filled)


def _requires_more(parameters: list[inspect.Parameter]) -> bool:
    """Tell whether a forward has arguments without a default that may be tokens, beside the first."""
    known = {*_ROTATIONS, *_MASKS, *_POSITIONS, *_BIASES, *_INPUT_NAMES, "cu_seqlens", "residual"}
    return any(
        parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.name not in known
        for parameter in parameters[1:]
    )


def has_other_norms(module: nn.Module) -> bool:
    """Tell whether a module has RMS norms beside those of queries, keys and values.

    Args:
        module: the module.

    Returns:
        True if so.
    """
    return any(
        "rmsnorm" in type(part).__name__.lower() and not _NORM.match(name.rpartition(".")[2])
        for name, part in module.named_modules()
    )


@contextmanager
def in_private(seed: int) -> Iterator[None]:
    """Isolate a trial, without dropout and other choices that a forward may make.

    Args:
        seed: of the random numbers within.
    """
    with isolated(seed=seed), _WithoutChoice():
        yield


class Stub(nn.Module):
    """Stands in for a linear map; only its size and type can be read.

    Args:
        features_in: features that the map takes.
        features_out: features that it gives.
    """

    def __init__(self, features_in: int, features_out: int) -> None:
        super().__init__()
        self.in_features, self.out_features = features_in, features_out
        self.bias: Tensor | None = None
        self.weight = torch.empty(0)
        self.weight._stands_for = self  # type: ignore[attr-defined]
        self.was_called = False


class Answer(Stub):
    """Answers with given features for each token of the input, whatever the input is.

    Args:
        features_in: features that the map takes.
        answer: ``(batch, length, features)``.
        way: how the forward is run.
        inner: what is done with what is not a sequence of tokens; by default that is an error.
        dim: where the features are in the input.
    """

    def __init__(
        self,
        features_in: int,
        answer: Tensor,
        way: MadeUp,
        inner: Callable[[Tensor], Tensor] | None = None,
        dim: int = -1,
    ) -> None:
        super().__init__(features_in, answer.shape[-1])
        self.answer, self.way, self.inner, self.dim = answer, way, inner, dim
        self.was_inner = False
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
        x = x.movedim(self.dim, -1)
        received = self.way.by_token(x, self.answer.shape[0])
        if received is None:
            if self.inner is None:
                raise ValueError("the tokens were taken apart before they were projected")
            self.was_inner = True
            return self.inner(x)
        self.was_called, self.received = True, received
        # A copy, as some work in place, laid out in memory as a linear map gives it, as some ask for a view.
        answer = self.way.lay_out(self.answer).reshape(*x.shape[:-1], -1)
        return answer.movedim(-1, self.dim).clone(memory_format=torch.contiguous_format)


class ReachedError(Exception):
    """The output projection was called."""


class Receive(Stub):
    """Ends the forward with what it is given.

    Args:
        features_in: features that the map takes.
        features_out: features that it gives.
        dim: where the features are in the input.
    """

    def __init__(self, features_in: int, features_out: int, dim: int = -1) -> None:
        super().__init__(features_in, features_out)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """End the forward.

        Args:
            x: what the linear map would be given.

        Raises:
            ReachedError: always, with `x`, features last.
        """
        raise ReachedError(x.movedim(self.dim, -1))


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
    module: nn.Module, stubs: Mapping[nn.Module, Stub], way: MadeUp, *, batch: int, width: int, is_traced: bool = False
) -> Run:
    """Copy a module with stubs in it, and run it once.

    Args:
        module: the module.
        stubs: what stands in for which of the modules within.
        way: the inputs that are made up.
        batch: sequences.
        width: features of the tokens that are made up.
        is_traced: note what the modules without a stub within were given and gave.

    Returns:
        What came of it; no output if what failed came after all stubs had been called.
    """
    trial = isolated_copy(module, stubs)
    trial.eval()  # what some forget to return
    for part in trial.modules():
        _make_plain(part, way.is_normed)
    trial.to(device="cpu", dtype=torch.float32)
    for name, parameter in trial.named_parameters():  # what is the identity at first, or zero, does not stay so
        parameter.requires_grad_(False)
        if _SINK.search(name):
            parameter.fill_(-1e4)
        elif _BIAS.search(name):
            parameter.zero_()
        elif parameter.dim() < 2 and name.endswith("weight"):  # a gain
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(std=0.3 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5)
    run = Run(None)
    if is_traced:
        _trace(trial, run)
    args, kwargs = way.arguments(trial.forward, batch, width)
    try:
        output = _called(trial, args, kwargs)
    except ReachedError as reached:
        (output,) = reached.args
    except Exception:
        if not all(stub.was_called for stub in stubs.values()):
            raise
        output = None  # what fails after the last of the maps matters to none of them
    run.output = output[0] if isinstance(output, tuple) else output
    return run


def _called(trial: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return trial.forward(*args, **kwargs)
    except KeyError as error:
        if error.args != ("eager",):
            raise
    for part in trial.modules():  # some know no attention but torch's own
        _choose_attention(part, "sdpa")
    return trial.forward(*args, **kwargs)


class _WithoutChoice(TorchFunctionMode):
    """Leave nothing out: no dropout, which much code has in evaluation by mistake, and all in place of the top k."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.linear:
            taken, weight = (
                args[i] if len(args) > i else kwargs.get(name) for i, name in enumerate(("input", "weight"))
            )
            if hasattr(weight, "_stands_for"):  # a weight that is used without its module being called
                return weight._stands_for(taken)
        if func in (F.dropout, torch.dropout):
            return args[0] if args else kwargs["input"]
        if func in (torch.topk, Tensor.topk):
            dim = kwargs.get("dim", args[2] if len(args) > 2 else -1)
            if "k" in kwargs:
                kwargs["k"] = args[0].shape[dim]
            else:
                args = (args[0], args[0].shape[dim], *args[2:])
        if func is F.scaled_dot_product_attention:
            # query, key, value, mask, and the probability of dropout
            args = args[:4] + ((0.0,) if len(args) > 4 else ()) + args[5:]
            if "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


class _Passing(nn.Module):
    """Stands in for a norm; some code asks the norm's weight for its type."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = torch.ones_like(weight) if isinstance(weight, Tensor) else None

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return x


def _choose_attention(module: nn.Module, name: str) -> None:
    config: Any = module.__dict__.get("config")
    if hasattr(config, "_attn_implementation"):
        config._attn_implementation = name  # the config is a copy as well


def _make_plain(module: nn.Module, is_normed: bool) -> None:
    """Take off what needs a GPU, or mixes heads in a way that leaves them in place."""
    _choose_attention(module, "eager")
    for name, child in module.named_children():
        kind = type(child).__name__.lower()
        # A norm over all heads only scales each of them, and one over the batch each of their features.
        if (_NORM.match(name) and "norm" in kind) or "batchnorm" in kind or ("rmsnorm" in kind and not is_normed):
            setattr(module, name, _Passing(read_tensor(child, "weight")))


def _trace(trial: nn.Module, run: Run) -> None:
    for name, part in trial.named_modules():
        if part is trial or any(isinstance(inner, Stub) for inner in part.modules()):
            continue

        def note(part: nn.Module, args: Any, output: Any, name: str = name) -> None:
            if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
                run.passed[name] = (args[0], output, part)

        part.register_forward_hook(note)
