"""A trial forward of a copy: what the claimed heads are is seen in what depends on what, not guessed.

Neither names nor row counts tell whether a fused matrix holds all queries, then all keys, then all values, whether two
of them are swapped, or whether heads are interleaved or mixed later on. So a copy of the module runs once, with stubs
that answer in place of its projections. Their answers are random and differ, from one element of the batch to the next,
in some heads of one role. Attention with the claimed heads, whatever its kernel, mask, scale or position embedding, is
known by four properties of what reaches the output projection:

- another query at one token changes the output of its head at that token, and nothing else;
- another key at one token changes the outputs of its heads at other tokens, and no other head's;
- twice the values double the outputs of their heads exactly, and change no other head's;
- values of one at one token and zero elsewhere give the attention weights: none is negative, and all features of a head
  have the same. So a claimed head is not two, side by side or one subtracted from the other.

The user's module, its buffers and the random state are not touched, and no large matrix is copied.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import re
import warnings
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hdi_callback.attention.heads import AttentionLayer, HeadProduct, HeadSlice, Role

_TOKENS = 8
_SEEDS = 3  # a draw may saturate a softmax, and then nothing changes; a claim that is wrong never passes
_CHANGED, _SAME = 1e-4, 1e-5  # relative to the largest output
_NORM = re.compile(r"(q|k|query|key)_?(norm|layer_?norm)$|norm_?[qk]$", re.IGNORECASE)
_INPUT_NAMES = frozenset({"q", "k", "v", "query", "key", "value", "queries", "keys", "values", "kv", "context"})


def acts_as_claimed(layer: AttentionLayer) -> bool | None:
    """Tell whether a module really computes attention with the heads that a layout claims.

    Args:
        layer: the claim; its output projection, if it has one, is a linear map within the module.

    Returns:
        True or False where the trial could be made; `None` where it could not, such as when the module needs inputs
        that nobody can make up, cannot be copied, or uses its projections without calling them.
    """
    verdicts = []
    for seed, is_batch_first in itertools.product(range(_SEEDS), (True, False)):
        verdicts.append(_try(layer, is_batch_first, seed))
        if verdicts[-1]:
            return True
        if verdicts[-2:] == [None, None]:
            break
    # Without an output projection what comes back may be anything, and is no evidence against the claim.
    return False if False in verdicts and layer.output_projection is not None else None


def _try(layer: AttentionLayer, is_batch_first: bool, seed: int) -> bool | None:
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
            torch.device("cpu"),
            torch.autocast("cpu", enabled=False),
            warnings.catch_warnings(),
            _WithoutDropout(),
        ):
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            changes = _Changes(layer)
            outputs = _forward(layer, changes, is_batch_first)
    except Exception:
        return None
    if outputs is None or not outputs.isfinite().all() or not outputs[0].any():
        return None
    return changes.are_seen_in(outputs)


class _Changes:
    """The projections' answers: in element 0 of the batch as drawn, in each other one with some heads changed."""

    def __init__(self, layer: AttentionLayer) -> None:
        self.layer = layer
        H, G = layer.num_heads, layer.num_key_heads
        # what is changed, and in which of its heads
        self.cases: list[tuple[Literal["query", "key", "value", "weights"], Tensor]] = [
            *(("query", heads) for heads in _subsets(H)),
            *(("key", heads) for heads in _subsets(G)),
            *(("value", heads) for heads in _subsets(G)),
            ("weights", torch.ones(G, dtype=torch.bool)),
        ]
        self.batch = 1 + len(self.cases)
        self.token = _TOKENS // 2
        self.answers: dict[nn.Module, Tensor] = {}
        roles: tuple[Role, ...] = ("query", "key", "value")
        for role in roles:
            linear = _linear(layer, role)
            features = _outer(layer, role).features[1]
            if linear not in self.answers:
                # Away from zero, as a query of nearly zero hides its keys.
                drawn = torch.empty(1, _TOKENS, features).uniform_(0.5, 1.5) * torch.randn(1, _TOKENS, features).sign()
                self.answers[linear] = drawn.repeat(self.batch, 1, 1)
            if role != "value":
                # So that products of queries and keys are of order one both with and without a scale.
                part = _outer(layer, role)
                self.answers[linear][..., part.index()] *= part.width**-0.125
        for element, (case, heads) in enumerate(self.cases, 1):
            changed: Role = "value" if case == "weights" else case
            rows = _outer(layer, changed).index()
            answer = self.answers[_linear(layer, changed)][element]
            if case == "value":
                answer[:, rows[heads].flatten()] *= 2
            elif case == "weights":
                answer[:, rows.flatten()] = 0
                answer[self.token, rows.flatten()] = 1
            else:
                answer[self.token, rows[heads].flatten()] *= -1

    def are_seen_in(self, outputs: Tensor) -> bool:
        """Compare outputs ``(batch, length, H, d_v)`` with what the changes should have done."""
        plain = outputs[0]
        scale = plain.abs().max()
        elsewhere = torch.arange(_TOKENS) != self.token
        for output, (case, heads) in zip(outputs[1:], self.cases):
            heads = heads.repeat_interleave(self.layer.num_heads // len(heads))
            change = (output - plain).abs().amax(-1) / scale  # (length, H)
            if case == "query":
                is_seen = change[self.token, heads].min() > _CHANGED
                heads = heads & (torch.arange(_TOKENS) == self.token)[:, None]  # and no other token's
            elif case == "key":
                is_seen = change[elsewhere][:, heads].amax(0).min() > _CHANGED
            elif case == "value":
                is_seen = (output - 2 * plain)[:, heads].abs().max() < _SAME * scale
            else:
                is_seen = output.min() > -_SAME and (output - output[..., :1]).abs().max() < _SAME
            others = change[~heads] if heads.dim() == 2 else change[:, ~heads]
            if not is_seen or (others > _SAME).any():
                return False
        return True


def _subsets(heads: int) -> list[Tensor]:
    """Make masks of heads by the bits of their numbers and the complements, so that any two heads are told apart."""
    numbers = torch.arange(heads)
    bits = [(numbers >> bit) % 2 == 1 for bit in range(max(1, (heads - 1).bit_length()))]
    return [mask for bit in bits for mask in (bit, ~bit) if mask.any()]


def _outer(layer: AttentionLayer, role: Role) -> HeadSlice:
    """The last map on the way to a role."""
    part = layer.slices[role]
    return part.outer if isinstance(part, HeadProduct) else part


def _linear(layer: AttentionLayer, role: Role) -> nn.Module:
    part = _outer(layer, role)
    return part.module.get_submodule(part.parameter.rpartition(".")[0])


class _Stub(nn.Module):
    """Stands in for a linear map; only its size and type can be read."""

    def __init__(self, features_in: int, features_out: int) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = features_in, features_out, None
        self.weight = torch.empty(0)


class _Answer(_Stub):
    """Answers with given features for each token of the input, whatever the input is."""

    def __init__(self, features_in: int, answer: Tensor) -> None:
        super().__init__(features_in, answer.shape[-1])
        self.answer = answer
        self.was_called = False

    def forward(self, x: Tensor) -> Tensor:
        self.was_called = True
        if x.dim() == 2 and x.shape[0] == self.answer[..., 0].numel():
            return self.answer.flatten(0, 1).clone()
        if x.shape[:-1] != self.answer.shape[:-1]:
            raise ValueError("the tokens were taken apart before they were projected")
        return self.answer.clone()


class _ReachedError(Exception):
    """The output projection was called."""


class _Receive(_Stub):
    """Ends the forward with what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        raise _ReachedError(x)


def _forward(layer: AttentionLayer, changes: _Changes, is_batch_first: bool) -> Tensor | None:
    """Run a copy with stubs for projections; give what reaches the output projection, ``(batch, length, H, d_v)``."""
    memo: dict[int, Any] = {}  # what `deepcopy` takes for copied already
    stubs = []
    for linear, answer in changes.answers.items():
        features_in = next(_outer(layer, role).in_features for role in layer.slices if _linear(layer, role) is linear)
        stubs.append(_Answer(features_in, answer if is_batch_first else answer.transpose(0, 1).contiguous()))
        memo[id(linear)] = stubs[-1]
    if layer.output_projection is not None:
        memo[id(layer.output_projection)] = _Receive(layer.num_heads * layer.value_dim, 1)
    trial = copy.deepcopy(layer.module, memo).eval()
    for module in trial.modules():
        _make_plain(module)
    trial.to(device="cpu", dtype=torch.float32)
    for parameter in trial.parameters():  # what is the identity at first, or zero, does not stay so
        parameter.uniform_(0.5, 1.5)
    width = stubs[0].in_features
    x = torch.randn(changes.batch, _TOKENS, width)[:1].expand(changes.batch, -1, -1)
    x = x if is_batch_first else x.transpose(0, 1)
    try:
        outputs = trial.forward(x, **_other_inputs(trial.forward, x, layer.head_dim))
    except _ReachedError as reached:
        (outputs,) = reached.args
    outputs = outputs[0] if isinstance(outputs, tuple) else outputs
    if not all(stub.was_called for stub in stubs):
        return None
    if outputs.dim() == 2:
        outputs = outputs.unflatten(0, x.shape[:2])
    outputs = outputs if is_batch_first else outputs.transpose(0, 1)
    if outputs.shape[:2] != (changes.batch, _TOKENS):
        return None
    by_head: Tensor = outputs.reshape(*outputs.shape[:2], layer.num_heads, layer.value_dim)
    return by_head


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


def _other_inputs(forward: Any, x: Tensor, head_dim: int) -> dict[str, Any]:
    """Make up the inputs that a forward needs beside its first: no mask, no cache, no rotation, the same tokens."""
    others: dict[str, Any] = {}
    for parameter in list(inspect.signature(forward).parameters.values())[1:]:
        name = parameter.name
        if name == "position_embeddings":
            others[name] = (torch.ones(1, _TOKENS, head_dim), torch.zeros(1, _TOKENS, head_dim))
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
