"""A forward is written down, and nothing of it is changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hdi_callback.attention.discovery.find import TapeReader
from hdi_callback.attention.tape import CONSTANT, DATA, WEIGHT, Tape
from tests.attention.by_hand import CASES, C


def outcome(module: nn.Module, inputs: tuple[torch.Tensor, ...], taped: bool, way: str) -> list[torch.Tensor]:
    """Give outputs, gradients and the random state of a forward and backward."""
    torch.manual_seed(3)
    module.zero_grad()
    context = torch.autocast("cpu", dtype=torch.bfloat16, enabled=way == "autocast")
    with context:
        if taped:
            with Tape(module) as tape:
                out = module(*inputs)
            assert tape.steps
            assert not tape.errors
        else:
            out = module(*inputs)
    out.float().square().mean().backward()
    gradients = [one.grad.clone() for one in module.parameters() if one.grad is not None]
    return [out.detach(), *gradients, torch.get_rng_state()]


@pytest.mark.parametrize("way", ["plain", "autocast"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_gradients_and_random_states_have_the_same_bits(name, way):
    module, _, inputs = CASES[name]()
    module.train()
    without = outcome(module, inputs, False, way)
    again = outcome(module, inputs, True, way)
    assert len(without) == len(again)
    assert all(torch.equal(one, other) for one, other in zip(without, again))


def test_inference_mode_shows_the_same_operations():
    module, _, inputs = CASES["written_out"]()
    ops = []
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, Tape(module) as tape:
            module(*inputs)
        ops.append([step.op for step in tape.steps])
    assert ops[0] == ops[1]


def test_a_view_is_no_step_and_shares_its_cell():
    model = nn.Linear(C, C, bias=False)
    x = torch.randn(2, C)
    with torch.no_grad(), Tape(model) as tape:
        model(x).view(2, 4, 6).transpose(0, 1)[1:].exp()
    assert [step.op for step in tape.steps] == ["mm", "exp"]
    product, exponential = tape.steps
    assert exponential.inputs[0].cell is product.outputs[0].cell
    assert exponential.inputs[0].offset == 6


def test_a_write_in_place_gives_a_storage_a_new_content():
    model = nn.Linear(C, C, bias=False)
    x = torch.randn(2, C)
    with torch.no_grad(), Tape(model) as tape:
        model(x)[:, :6].add_(1)
    cell = tape.steps[-1].outputs[0].cell
    assert cell.before is tape.steps[0].outputs[0].cell
    assert cell.written.shape == (2, 6)


def test_kinds_say_what_a_tensor_depends_on():
    model = nn.Linear(C, C, bias=False)
    x = torch.randn(2, C)
    with torch.no_grad(), Tape(model) as tape:
        torch.arange(3) + 1
        model(x)
    kinds = {step.op: [view.cell.kind for view in step.inputs] for step in tape.steps}
    assert kinds["add"] == [CONSTANT]
    assert kinds["mm"] == [DATA, WEIGHT]


def test_the_module_that_runs_is_known_without_hooks_and_by_direct_calls_of_forward():
    class Inner(nn.Module):
        def forward(self, x):
            return x.softmax(-1)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner.forward(self.inner(x)).softmax(0)

    model, x = Outer(), torch.randn(2, 3)
    with Tape(model) as tape:
        model(x)
    assert [step.path for step in tape.steps] == ["inner", "inner", ""]
    assert all(step.line.rpartition(":")[0] == __file__ for step in tape.steps)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_recording_never_raises_into_the_forward(monkeypatch):
    module, _, inputs = CASES["separate_and_fused"]()
    monkeypatch.setattr(Tape, "_write", lambda *_: 1 / 0)
    with Tape(module) as tape:
        out = module(*inputs)
    assert torch.isfinite(out).all()
    assert "ZeroDivisionError" in tape.errors[0]


def test_small_masks_and_numbers_are_kept():
    model = nn.Linear(C, C, bias=False)
    hidden = torch.ones(2, 2, dtype=torch.bool).triu(1)
    x = torch.randn(2, C)
    with torch.no_grad(), Tape(model) as tape:
        model(x)[:, :2].mul(0.5).masked_fill(hidden, -1e9)
    assert tape.steps[1].args[1] == 0.5
    assert torch.equal(tape.steps[2].args[1].value, hidden)
    hidden.zero_()
    assert tape.steps[2].args[1].value.any()


def test_recomputation_is_written_down_in_the_backward():
    module, _, inputs = CASES["separate_and_fused"]()
    with Tape(module) as tape:
        checkpoint(module, *inputs, use_reentrant=False).sum().backward()
    assert sum(step.op.startswith("_scaled_dot_product") and "backward" not in step.op for step in tape.steps) == 2


def test_what_a_debugger_shows_of_a_forward_is_a_line_each():
    module, _, inputs = CASES["written_out"]()
    with torch.no_grad(), Tape(module) as tape:
        module(*inputs)
    reader = TapeReader(tape).finish()
    view = next(view for step in tape.steps for view in step.inputs)
    shown = [*tape.steps, *reader.attentions, view, view.cell, reader.labels.read(view)]
    assert all(len(repr(each)) < 500 and "\n" not in repr(each) for each in shown)
    softmax = next(step for step in tape.steps if step.op == "_softmax")
    assert repr(softmax).startswith(f"<Step {softmax.number} _softmax in")
