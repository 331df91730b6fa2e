"""torch's `context_parallel`, whose ring runs here with the kernel of CPUs, for which torch has no place in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tests.models import HEADS, LENGTH, WIDTH, Attention
from tests.regimes.test_ddp import METRICS, monitor_of
from tests.regimes.test_sequence_parallel import model_of


class Causal(Attention):
    """Causal, as `context_parallel` shares the tokens out evenly and then takes no other."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),))


@contextmanager
def with_the_kernel_of_cpus() -> Iterator[None]:
    """Let torch's ring call the attention kernel of CPUs as it calls those of CUDA."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    aten = torch.ops.aten
    forward_op = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward_op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def forward(op: Any, args: Any, kwargs: Any) -> Any:
        q, k, v, dropout, is_causal = (*args, *(0.0, False)[len(args) - 3 :])
        local = [one.to_local() for one in (q, k, v)]
        given = {"dropout_p": dropout, "is_causal": is_causal, "scale": kwargs.get("scale")}
        found = ring._templated_ring_attention(
            q.device_mesh.get_group(), 2, forward_op, query=local[0], key=local[1], value=local[2], **given
        )
        return tuple(DTensor.from_local(one, q.device_mesh, [Shard(2)]) for one in found)

    def backward(op: Any, args: Any, kwargs: Any) -> Any:
        *given, dropout, is_causal = args
        names = ("grad_out", "query", "key", "value", "out", "logsumexp")
        local = {name: one.to_local().contiguous() for name, one in zip(names, given)}
        found = ring._templated_ring_attention_backward(
            given[1].device_mesh.get_group(), 2, backward_op, grad_out_name="grad_out", **local,
            is_causal=is_causal, dropout_p=dropout, scale=kwargs.get("scale"),
        )  # fmt: skip
        return tuple(DTensor.from_local(one, given[1].device_mesh, [Shard(2)]) for one in found[:3])

    ring.custom_ops.update({forward_op: forward, backward_op: backward})
    try:
        yield
    finally:
        for op in (forward_op, backward_op):
            ring.custom_ops.pop(op)
            ring.DTensor._op_dispatcher._custom_op_handlers.pop(op, None)


ALL = [name for name in (*METRICS, "attention_entropy_min") if "importance" not in name]


def embedded() -> Tensor:
    return torch.randn(3, LENGTH, WIDTH, generator=torch.Generator().manual_seed(3))


def read_in_context(rank: int) -> dict[str, Any]:
    from torch.distributed.tensor.experimental import context_parallel

    model = model_of(Causal)
    with with_the_kernel_of_cpus(), monitor_of(model, metrics=ALL) as monitor:
        for step in (0, 1):
            monitor.arm()
            x = embedded()
            with context_parallel(mesh(), buffers=[x], buffer_seq_dims=[1]):
                model.blocks(x).square().sum().backward()
            record = monitor.measure(step).record()
        grads = torch.cat([one.grad.flatten() for one in model.blocks.parameters()])
        dist.all_reduce(grads)
        return {"tags": record.scalars(ALL), "absent": record.absent, "refused": [str(one) for one in monitor.refused],
                "gradients": grads.tolist()}  # fmt: skip


def read_alone() -> dict[str, Any]:
    model = model_of(Causal)
    with monitor_of(model, metrics=ALL) as monitor:
        for step in (0, 1):
            monitor.arm()
            model.blocks(embedded()).square().sum().backward()
            record = monitor.measure(step).record()
        grads = torch.cat([one.grad.flatten() for one in model.blocks.parameters()])
        return {"tags": record.scalars(ALL), "absent": record.absent, "gradients": grads.tolist()}


def run_without_the_kernel(rank: int) -> str:
    from torch.distributed.tensor.experimental import context_parallel

    x = embedded()
    with context_parallel(mesh(), buffers=[x], buffer_seq_dims=[1]):
        heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        try:
            F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        except (NotImplementedError, RuntimeError) as error:
            return str(error)
    return "it runs"


def test_in_a_context_of_torch_all_tokens_make_one_reading(two_ranks):
    whole = read_alone()
    expected = {tag: value for tag, value in whole["tags"].items() if not tag.startswith("attention_")}
    assert len(expected) > 20
    for one in two_ranks(read_in_context):
        assert one.answer["gradients"] == pytest.approx(whole["gradients"], rel=1e-3, abs=1e-4)  # the ring is right
        assert one.answer["refused"] == []
        assert one.answer["tags"] == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert {key.partition("/")[0] for key in one.answer["absent"]} == {"attention rows"}
        assert all("(DTensor)" in why for why in one.answer["absent"].values())


def test_torch_has_no_ring_attention_on_cpus(two_ranks):
    """Once it has, the test above needs no kernel of its own."""
    for one in two_ranks(run_without_the_kernel):
        assert "_scaled_dot_product_flash_attention_for_cpu" in one.answer
