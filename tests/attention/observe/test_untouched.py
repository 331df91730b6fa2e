"""A training that is observed at every step is the training that it would be without."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from hdi_callback.attention.observe import AttentionObserver
from tests.attention.observe.oracle import Rows
from tests.attention.sweep.architectures import variants
from tests.models import Attention, Block

WIDTH, LENGTH, CLASSES, STEPS = 32, 12, 5, 3


class Net(nn.Module):
    """An embedding, a body and a linear head; dropout is drawn from torch's generator."""

    def __init__(self, body: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.embed, self.body, self.head = nn.Embedding(16, WIDTH), body, nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens):
        return self.head(F.dropout(self.body(self.embed(tokens)), self.dropout, self.training).mean(1))


class Checkpointed(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.blocks, self.options = nn.ModuleList(Block(WIDTH, 4, 0.1) for _ in range(2)), options

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, **self.options)
        return x


class WrittenOut(Attention):
    """Products of its own, which a selective checkpoint keeps, beside what an observer multiplies."""

    def forward(self, x):
        q, k, v = (
            proj(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        fused = F.scaled_dot_product_attention(q, k, v)
        written = (q @ k.mT).softmax(-1) @ v
        return self.out_proj((fused + written).transpose(1, 2).flatten(2))


class CheckpointedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = WrittenOut(WIDTH, 4)

    def forward(self, x):
        kept = partial(create_selective_checkpoint_contexts, save_products)
        return checkpoint(self.attn, x, use_reentrant=False, context_fn=kept)


def save_products(context, operation, *args, **kwargs):
    is_product = operation in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


class Frozen(nn.Module):
    """An encoder that is not trained, in evaluation mode, before one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.block = encoder().requires_grad_(False), Block(WIDTH, 4, 0.1)

    def train(self, mode: bool = True):
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            x = self.frozen(x)
        return self.block(x)


class OnAnotherDevice(nn.Module):
    """A mode of the user's own is entered and left within."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(WIDTH, 4, 0.1)

    def forward(self, x):
        with torch.device("cpu"):
            return self.block(x) + torch.zeros(1)


class Raising(nn.Module):
    """An attention that fails is caught by the model."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.failing = Block(WIDTH, 4, 0.1), Attention(WIDTH, 4)

    def forward(self, x):
        try:
            self.failing(x[..., :3])
        except RuntimeError:
            x = x + 1
        return self.block(x)


class OfTransformers(nn.Module):
    """A model of transformers on given embeddings."""

    def __init__(self, family: str, **settings: Any) -> None:
        super().__init__()
        self.model = next(variants(family))
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1
        config = self.model.config
        for name in ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "dropout_rate"):
            if hasattr(config, name):
                setattr(config, name, 0.1)
        self.model.set_attn_implementation(settings.get("attention", "sdpa"))
        if settings.get("checkpoints"):
            self.model.gradient_checkpointing_enable()
        self.size = self.model.get_input_embeddings().embedding_dim

    def forward(self, x):
        x = x[..., : self.size]
        return F.pad(self.model(inputs_embeds=x).last_hidden_state, (0, max(0, WIDTH - self.size)))[..., :WIDTH]


def encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2)


BODIES = {
    "blocks": lambda: nn.Sequential(Block(WIDTH, 4, 0.1), Block(WIDTH, 4, 0.1)),
    "torch's encoder": encoder,
    "torch's encoder, frozen in evaluation mode": Frozen,
    "checkpoints": partial(Checkpointed, use_reentrant=False),
    "reentrant checkpoints": partial(Checkpointed, use_reentrant=True),
    "selective checkpoints": lambda: Checkpointed(
        use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, save_products)
    ),
    "selective checkpoints of products": CheckpointedAttention,
    "a device within": OnAnotherDevice,
    "an attention that raises": Raising,
    "gpt2": lambda: OfTransformers("gpt2"),
    "gpt2, eager, checkpointed": lambda: OfTransformers("gpt2", attention="eager", checkpoints=True),
    "bert, eager": lambda: OfTransformers("bert", attention="eager"),
    "llama": lambda: OfTransformers("llama"),
    "gemma2, eager": lambda: OfTransformers("gemma2", attention="eager"),
    "mixtral": lambda: OfTransformers("mixtral"),
    "compiled": lambda: nn.Sequential(Block(WIDTH, 4, 0.1), torch.compile(Block(WIDTH, 4, 0.1), backend="eager")),
}


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def train(body: Any, *, is_observed: bool, autocast: bool = False) -> tuple[list[bytes], list[Any], list[Any]]:
    """Train, and give losses, gradients and weights, and random states, bit by bit; and the cores of the last step."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    model = Net(body(), dropout=0.1).train()
    optimizer = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=0.01)
    observer = AttentionObserver(model, reduce_rows=lambda chunk: Rows((chunk,)), reduce_norms=lambda *arguments: 0)
    hooks_before = hooks_of(model)
    tokens = torch.randint(16, (4, LENGTH))
    trace: list[Any] = []
    for _ in range(STEPS):
        if is_observed:
            observer.arm()
        with torch.autocast("cpu", enabled=autocast):
            loss = F.cross_entropy(model(tokens), tokens.sum(1) % CLASSES)
        loss.backward()
        observer.disarm()
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        trace += [loss.detach().clone(), *(one.clone() for one in gradients)]
        optimizer.step()
        optimizer.zero_grad()
    trace += [one.detach() for one in model.parameters()]
    states = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # noqa: NPY002
    assert _get_current_function_mode_stack() == []
    assert hooks_of(model) == hooks_before
    assert [
        module for module in model.modules() if "forward" in vars(module) and not hasattr(module, "_orig_mod")
    ] == []
    return (
        [one.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() for one in trace],
        states,
        list(observer.cores),
    )


@pytest.mark.some_slow(quick=11)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("body", BODIES)
def test_losses_gradients_weights_and_random_states_are_bit_identical(body, autocast):
    if body == "compiled":
        torch._dynamo.reset()
    plain, states, _ = train(BODIES[body], is_observed=False, autocast=autocast)
    again, states_again, _ = train(BODIES[body], is_observed=False, autocast=autocast)
    assert plain == again  # else nothing is shown
    watched, states_watched, cores = train(BODIES[body], is_observed=True, autocast=autocast)
    assert watched == plain
    assert states_watched == states == states_again
    expected = 1 if body in ("torch's encoder, frozen in evaluation mode", "a device within", "compiled") else 2
    expected -= body == "an attention that raises"
    assert [core.runs for core in cores] == [1] * expected  # recomputation is not counted again
    assert [core.unread for core in cores] == [""] * expected


def test_two_observers_of_torchs_encoder_observe_the_same_and_remove_their_modes():
    model = nn.Sequential(nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True))
    observers = [AttentionObserver(model), AttentionObserver(model)]
    for observer in observers:
        observer.arm()
    model(torch.randn(2, LENGTH, WIDTH))
    assert _get_current_function_mode_stack() == []
    for observer in observers:
        observer.disarm()
        assert [core.module for core in observer.cores] == ["0.self_attn"]


def test_a_frozen_encoder_still_takes_the_fast_path_and_is_reported_for_it(monkeypatch):
    calls = []
    kernel = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(
        torch, "_transformer_encoder_layer_fwd", lambda *arguments: calls.append(1) or kernel(*arguments)
    )
    model = Net(Frozen()).train()
    observer = AttentionObserver(model)
    observer.arm()
    model(torch.randint(16, (2, LENGTH)))
    observer.disarm()
    assert len(calls) == 2
    assert [core.module for core in observer.cores] == ["body.block.attn"]
    assert observer.closed == {}
    assert list(observer.skipped) == ["body.frozen"]
    assert "fast path" in observer.skipped["body.frozen"]
    assert not any(vars(part).get("forward") or part._forward_hooks for part in model.modules())


@pytest.mark.parametrize("compile_it", ["the model", "a block", "in place"])
def test_compiled_parts_are_not_recompiled_and_the_reason_is_given(compile_it):
    torch._dynamo.reset()
    model: Any = Net(nn.Sequential(Block(WIDTH, 4), Block(WIDTH, 4))).train()
    if compile_it == "in place":
        model.body[1].compile(backend="eager", fullgraph=True)
    elif compile_it == "a block":
        model.body[1] = torch.compile(model.body[1], backend="eager", fullgraph=True)
    watched = torch.compile(model, backend="eager", fullgraph=True) if compile_it == "the model" else model
    tokens = torch.randint(16, (2, LENGTH))
    expected = watched(tokens).detach()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            observer = AttentionObserver(watched)
            observer.arm()
            assert torch.equal(watched(tokens), expected)
            observer.disarm()
            assert torch.equal(watched(tokens), expected)
    assert len(observer.cores) == (0 if compile_it == "the model" else 1)
    assert [reason for reason in observer.closed.values() if "compiled" in reason] != []


@pytest.mark.parametrize("is_armed_first", [True, False])
def test_a_compiled_training_step_is_compiled_once(is_armed_first):
    torch._dynamo.reset()
    model = Net(Block(WIDTH, 4)).train()
    step = torch.compile(lambda tokens: model(tokens).sum(), backend="eager", fullgraph=True)
    observer, tokens = AttentionObserver(model), torch.randint(16, (2, LENGTH))
    expected = model(tokens).sum()
    if is_armed_first:
        observer.arm()
    assert torch.equal(step(tokens), expected)
    observer.disarm()
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(step(tokens), expected)
        observer.arm()
        assert torch.equal(step(tokens), expected)
        observer.disarm()
        assert torch.equal(step(tokens), expected)
    assert not observer.has_run


def test_a_region_compiled_by_a_decorator_is_not_observed():
    torch._dynamo.reset()
    model = Net(nn.Sequential(Block(WIDTH, 4), Decorated())).train()
    tokens = torch.randint(16, (2, LENGTH))
    expected = model(tokens).detach()
    observer = AttentionObserver(model)
    with torch._dynamo.config.patch(error_on_recompile=True):
        observer.arm()
        assert torch.equal(model(tokens), expected)
        observer.disarm()
    assert [core.module for core in observer.cores] == ["body.0.attn"]
    assert observer.closed == {"body.1": "it calls `fused`, which is compiled"}


@torch.compile(backend="eager")
def fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        return fused(*(part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))).flatten(2)[
            :, :LENGTH, :WIDTH
        ]


def test_a_forward_that_fails_leaves_no_mode_or_hook():
    model = Net(nn.Sequential(Block(WIDTH, 4), nn.Linear(3, 3)))
    observer = AttentionObserver(model)
    observer.arm()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(torch.randint(16, (2, LENGTH)))
    assert _get_current_function_mode_stack() == []
    observer.disarm()
    assert hooks_of(model) == 0
    assert [core.module for core in observer.cores] == ["body.0.attn"]


def test_transforms_of_torch_func_are_not_touched():
    model, tokens = Net(Block(WIDTH, 4)).eval(), torch.randint(16, (3, 2, LENGTH))
    expected = torch.func.vmap(model)(tokens)
    observer = AttentionObserver(model)
    observer.arm()
    assert torch.equal(torch.func.vmap(model)(tokens), expected)
    observer.disarm()
    assert not observer.has_run
    assert observer.reason == "it runs under a transform of torch.func"


def test_no_tensor_is_kept_alive_by_what_was_observed():
    import weakref

    kept: list[weakref.ref] = []

    class Spying(Attention):
        def forward(self, x):
            scores = (self.q_proj(x) @ self.k_proj(x).mT).softmax(-1)
            kept.append(weakref.ref(scores))
            return self.out_proj(scores @ self.v_proj(x))

    model = Net(Spying(WIDTH, 1))
    observer = AttentionObserver(model, reduce_rows=lambda chunk: chunk.weights.sum())
    observer.arm()
    model(torch.randint(16, (2, LENGTH)))
    observer.disarm()
    assert len(observer.cores) == 1
    assert [one() for one in kept] == [None]
