"""The operator by which a compiled graph hands a tensor out, called outside of any graph."""

from __future__ import annotations

import torch

from hdi_callback.attention.capture.graph_operator import Entry, take_in_graph


def test_the_receiver_gets_a_detached_tensor_and_the_passed_one_keeps_its_gradient():
    taken: list[torch.Tensor] = []
    entry = Entry(taken.append)
    passed, outputs = torch.randn(2, 3, requires_grad=True), torch.randn(4, requires_grad=True)
    result = take_in_graph(passed, outputs, entry)
    (one,) = taken
    assert torch.equal(one, outputs)
    assert not one.requires_grad
    assert torch.equal(result, passed)
    (3 * result).sum().backward()
    assert passed.grad.tolist() == [[3.0] * 3] * 2
    assert outputs.grad is None


def test_each_receiver_gets_its_own_tensors_and_a_deleted_one_gets_none():
    first, second = [], []
    one, other = Entry(first.append), Entry(second.append)
    x = torch.ones(2)
    take_in_graph(x, 1 * x, one)
    take_in_graph(x, 2 * x, other)
    assert [taken.tolist() for taken in first + second] == [[1, 1], [2, 2]]
    number = one.number
    del one
    assert torch.equal(torch.ops.hdi_callback.take(x, x, number), x)
    assert len(first) == 1


def test_the_fake_result_of_the_operator_has_the_shape_of_the_passed_tensor():
    with torch.device("meta"):
        passed, outputs = torch.empty(2, 3), torch.empty(7)
    made = take_in_graph(passed, outputs, Entry(lambda _: None))
    assert (made.shape, made.device.type) == ((2, 3), "meta")
