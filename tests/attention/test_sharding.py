"""Weights, heads and captures of models that are spread over two ranks, against the same model on one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from hdi_callback.attention.capture.capture import Capture
from hdi_callback.attention.discovery.find import survey, survey_tape
from hdi_callback.attention.dtensors import whole
from hdi_callback.attention.first_calls import FirstCalls
from hdi_callback.errors import UnsupportedAttentionError
from tests.attention.models import blocks, contradiction
from tests.processes import on_ranks

W, H, G, D = 24, 4, 2, 6
ROLES = ("query", "key", "value", "output")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (
            nn.Linear(W, H * D),
            nn.Linear(W, G * D),
            nn.Linear(W, G * D),
            nn.Linear(H * D, W),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, D)).transpose(1, 2) for one in (self.q, self.k, self.v))
        k, v = (one.repeat_interleave(H // G, 1) for one in (k, v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.up, self.down = nn.LayerNorm(W), Attention(), nn.Linear(W, 2 * W), nn.Linear(2 * W, W)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.a(self.norm(x))
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.1, self.training)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(W, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PLAN = {
    "a.q": ColwiseParallel(), "a.k": ColwiseParallel(), "a.v": ColwiseParallel(), "a.o": RowwiseParallel(),
    "up": ColwiseParallel(), "down": RowwiseParallel(),
}  # fmt: skip


def sharded(model: Model, mesh: Any, **options: Any) -> Model:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def parallel(model: Model, mesh: Any) -> Model:
    for block in model.blocks:
        parallelize_module(block, mesh, PLAN)
    return model


def both(model: Model) -> Model:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    return sharded(parallel(model, mesh["tensor"]), mesh["data"])


def line() -> Any:
    return init_device_mesh("cpu", (2,))


CASES: dict[str, Callable[[Model], Model]] = {
    "fsdp2": lambda model: sharded(model, line()),
    "fsdp2, bfloat16": lambda model: sharded(model, line(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "fsdp2, whole between": lambda model: sharded(model, line(), reshard_after_forward=False),
    "tensor parallel": lambda model: parallel(model, line()),
    "both": both,
}


class Watch:
    def __init__(self, model: Model) -> None:
        self.model, self.layers, self.taken = model, (), []
        self.handle = FirstCalls(model, self.found, survey_tape)

    def found(self, survey, recording) -> None:
        assert not survey.refused
        self.layers = survey.layers
        rows = lambda logits, weights, **facts: weights  # noqa: E731
        self.capture = Capture(self.model, survey.layers, calls=self.handle, max_tokens=100, padding=None, rows=rows)
        self.capture.arm()


def train(wrap, watch: bool, rank: int) -> tuple[list[Any], Watch | None]:
    torch.manual_seed(0)
    model = wrap(Model())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    kept, watcher = [], Watch(model) if watch else None
    torch.manual_seed(1 + rank)
    for step in range(3):
        if watcher is not None and step == 2:
            watcher.capture.arm()
        out = model(torch.randn(2, 8, W, generator=torch.Generator().manual_seed(step)))
        F.cross_entropy(out.float().flatten(0, 1), torch.arange(16) % 3).backward()
        if watcher is not None and step in (0, 2):
            watcher.taken.append(watcher.capture.take())
        kept.append(digest(out))
        kept += [digest(one.grad) for one in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        kept += [digest(one) for one in model.parameters()]
    return [*kept, digest(torch.get_rng_state())], watcher


def digest(tensor: Tensor) -> str:
    local = tensor.detach()
    local = local.to_local() if isinstance(local, DTensor) else local
    return hashlib.md5(local.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def check(rank: int, name: str) -> None:
    wrap = CASES[name]
    plain, _ = train(wrap, False, rank)
    kept, _ = train(wrap, True, rank)
    assert kept == plain
    torch.manual_seed(0)
    single = Model()
    alone = survey(single, lambda: single(torch.randn(2, 8, W))).layers
    torch.manual_seed(0)
    fresh = Watch(wrap(Model()))
    x = torch.randn(2, 8, W, generator=torch.Generator().manual_seed(0))
    fresh.model.eval()(x)
    taken = fresh.capture.take()
    single.eval()
    capture = Capture(single, alone, max_tokens=100, padding=None, rows=lambda logits, *_, **__: [1] * len(logits))
    capture.arm()
    single(x)
    truth = capture.take()
    for layer, other in zip(fresh.layers, alone, strict=True):
        assert (layer.name, layer.num_heads, layer.num_key_heads, layer.key_of) == (other.name, H, G, (0, 0, 1, 1))
        assert contradiction(layer) is None
        for role in ROLES:
            assert torch.equal(layer.weight(role), other.weight(role))
            assert layer.weights[role].is_sharded == (name != "fsdp2, whole between")
        tolerance = 2e-2 if "bfloat16" in name else 1e-5
        assert torch.allclose(taken[layer.name].outputs.float(), truth[layer.name].outputs, atol=tolerance)
        is_spread = name in ("tensor parallel", "both")
        assert ("rows" in taken[layer.name].reasons) == is_spread
        if name == "fsdp2, whole between":
            continue
        with pytest.raises(UnsupportedAttentionError, match="spread over several ranks"):
            layer.weights["key"].write(0, torch.zeros(D, W))
        layer.weight("key").square().sum().backward()  # as a penalty does
        grad = layer.module.k.weight.grad
        assert torch.allclose(whole(grad), 2 * other.module.k.weight)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_spread_models_are_found_read_and_captured_as_whole_ones(name, tmp_path):
    on_ranks(2, tmp_path, check, name)


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_sharded_weight_is_gathered_and_differentiable(one_rank):
    linear = nn.Linear(6, 4)
    plain = linear.weight.detach().clone()
    fully_shard(linear, mesh=one_rank)
    weight = blocks(linear, "weight", heads=2, width=2)
    assert weight.is_sharded
    assert torch.equal(weight.tensor(), plain.view(2, 2, 6))
    weight.tensor().square().sum().backward()
    assert torch.allclose(linear.weight.grad.full_tensor(), 2 * plain)


def test_pieces_that_are_no_dtensors_are_refused_by_name():
    parameter = nn.Parameter(torch.empty(0))
    parameter.ds_id = 3
    with pytest.raises(UnsupportedAttentionError, match="DeepSpeed's ZeRO-3"):
        whole(parameter)
