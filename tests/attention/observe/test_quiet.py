"""What is computed for a reading is hidden from modes, autograd and autocast."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hdi_callback.attention.observe.quiet import holds_numbers, quiet, unobservable_reason


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


def test_quiet_computation_is_invisible_to_modes_and_autograd_and_ignores_autocast():
    x = torch.randn(3, 3, requires_grad=True)
    with Functions() as functions, Operators() as operators, torch.autocast("cpu", dtype=torch.bfloat16):
        torch.mm(x, x)
        with quiet(x.device):
            made = torch.mm(x, x)
        assert torch.mm(x, x).dtype == torch.bfloat16
    assert [functions.calls.count("mm"), operators.calls.count("aten.mm.default")] == [2, 2], "those around it alone"
    assert made.dtype == torch.float32
    assert not made.requires_grad


def test_forwards_inside_a_backward_a_trace_or_a_transform_are_not_observed_and_a_transform_is_named():
    said = [unobservable_reason()]
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: said.append(unobservable_reason()))
    x.sum().backward()

    def noting(x):
        said.append(unobservable_reason())
        return x

    torch.jit.trace(noting, torch.ones(2), check_trace=False)
    torch.func.vmap(noting)(torch.ones(2))
    assert said == [None, "", "", "it runs under a transform of torch.func"]


def test_fake_and_meta_tensors_are_known_to_hold_no_numbers():
    plain = torch.ones(2)
    assert holds_numbers(plain)
    with FakeTensorMode():
        others = [torch.ones(2, device="meta"), torch.ones(2)]
    assert [holds_numbers(one) for one in (*others, plain.to("meta"))] == [False] * 3
