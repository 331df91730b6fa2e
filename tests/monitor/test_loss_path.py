"""The way from an output of the model to the loss is read from the graph of autograd while the backward runs."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hdi_callback import load_history, watch_heads
from hdi_callback.monitor import contract
from hdi_callback.monitor.loss_path import LossPaths, path_to_loss

START = 40
ENTROPY = {"log_softmax (dim -1)", "nll_loss (ignore_index -100, reduction 1)"}


def path_of(loss, rows=6, classes=4, differentiate=torch.autograd.backward):
    """The operations from an output, behind a layer, to a loss."""
    layer, paths = nn.Linear(5, classes), []
    output = layer(torch.randn(rows, 5))
    output.grad_fn.register_prehook(lambda gradients: paths.append(path_to_loss(torch._C._current_autograd_node())))
    differentiate(loss(output, layer), inputs=[layer.weight])
    (path,) = paths
    return path


def labels_of(output):
    return torch.arange(len(output)) % output.shape[1]


def entropy(output, layer):
    return F.cross_entropy(output, labels_of(output))


PATHS = {
    "cross entropy": (entropy, ENTROPY),
    "of a cast and a view": (
        lambda y, _: F.cross_entropy(y.double().view(3, -1, 4).flatten(0, 1), labels_of(y)),
        ENTROPY,
    ),
    "of a slice": (lambda y, _: F.cross_entropy(y[1:, :3], labels_of(y[1:, :3])), ENTROPY),
    "of a slice that is the whole": (lambda y, _: F.cross_entropy(y[: len(y), :4], labels_of(y)), ENTROPY),
    "another label is ignored": (
        lambda y, _: F.cross_entropy(y, labels_of(y), ignore_index=0),
        {"log_softmax (dim -1)", "nll_loss (ignore_index 0, reduction 1)"},
    ),
    "softmax over rows": (lambda y, _: y.softmax(0).square().sum(), {"softmax (dim -2)", "pow (exponent 2)", "sum"}),
    "a term of the weights beside it": (
        lambda y, layer: entropy(y, layer) + layer.weight.exp().square().mean(),
        {"add", *ENTROPY},
    ),
    "a second output of the graph": (lambda y, _: y.exp().sum() / y.detach().exp().sum(), {"div", "sum", "exp"}),
    "targets in a row": (
        lambda y, _: (y.narrow(1, 0, 1) - torch.randn(len(y))).square().mean(),
        {"sub (repeated along axis -1)", "pow (exponent 2)", "mean"},
    ),
    "advantages in a column": (
        lambda y, _: (y.select(1, 0) * torch.randn(len(y), 1)).mean(),
        {"select (dim -1)", "mul (repeated along axis -2)", "mean"},
    ),
    "one limit": (lambda y, _: y.clamp(max=1).sum(), {"clamp (max 1)", "sum"}),
    "limits that are tensors": (lambda y, _: y.clamp(torch.zeros(()), torch.ones(())).sum(), {"clamp", "sum"}),
    "twice the same": (lambda y, _: y.exp().exp().exp().sum(), {"exp", "a second exp", "sum"}),
}  # fmt: skip


@pytest.mark.parametrize("name", PATHS)
def test_the_operations_between_an_output_and_the_loss_are_those_of_its_formula(name):
    loss, expected = PATHS[name]
    assert path_of(loss) == expected
    assert path_of(loss, differentiate=torch.autograd.grad) == expected


def test_sizes_are_no_matter():
    for loss, expected in PATHS.values():
        assert path_of(loss, rows=12) == expected


def test_a_loss_is_found_that_another_thread_differentiates():
    paths = []

    def in_a_thread():
        output = nn.Linear(5, 4)(torch.randn(6, 5))
        look = lambda: paths.append(path_to_loss(output.grad_fn))  # noqa: E731

        def from_another_thread(gradients):
            thread = threading.Thread(target=look)  # as on CUDA, where the engine has threads of its own
            thread.start()
            thread.join()

        output.grad_fn.register_prehook(from_another_thread)
        entropy(output, None).backward()

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert paths == [ENTROPY]


def test_nothing_is_known_outside_of_a_backward():
    assert path_to_loss(nn.Linear(5, 4)(torch.randn(6, 5)).grad_fn) is None


def departures(*paths):
    usual = LossPaths()
    return [usual.departure("it", frozenset(path)) for path in paths]


def test_told_is_what_was_always_there_or_never_and_only_at_two_readings():
    text = "the way from it to the loss has now c and has lost b"
    assert departures(*[{"a", "b"}] * 6, *[{"a", "c"}] * 3) == [*[""] * 6, text, text, ""]
    assert departures(*[{"a"}, {"a", "b"}] * 4, {"a"}, {"a"}, {"b"})[-3:] == [
        "", "", "the way from it to the loss has lost a"
    ]  # fmt: skip
    assert departures(*[{"a"}] * 4, {"b"}) == [""] * 5, "too few"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.out, self.head = (
            nn.Embedding(9, 16), nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 4)
        )  # fmt: skip

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.head(x.mean(1))


def regressed(y, target):
    return (y[:, 0] - target).square().mean()


def sometimes(y, target):
    loss = regressed(y, target)
    return loss + y.abs().mean() if float(torch.rand(())) < 0.5 else loss


TOLD = {
    "targets in a column": (regressed, lambda y, t: regressed(y, t[:, None]), "has now sub (repeated along axis -2)"),
    "no root": (lambda y, t: regressed(y, t).sqrt(), regressed, "has lost sqrt"),
    "another loss": (regressed, lambda y, t: (y[:, 0] - t).abs().mean(), "has now abs and has lost pow (exponent 2)"),
}
SILENT = {
    "a regression": (regressed, regressed),
    "a term now and then": (sometimes, sometimes),
    "losses in turns": (lambda y, t: regressed(y, t) if float(torch.rand(())) < 0.5 else y.exp().mean(), regressed),
}


def alerts_of(before, after, folder):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with watch_heads(model, optimizer, 1, log_dir=folder) as heads:
        for step in range(60):
            with heads.step():
                output = model(torch.randint(9, (8, 5)))
                (before if step < START else after)(output, torch.randn(8)).backward()
                optimizer.step()
                optimizer.zero_grad()
    return [alert for alert in load_history(heads.history_path).alerts if alert.rule == contract.NAME]


@pytest.mark.parametrize("name", TOLD)
def test_another_way_to_the_loss_is_a_notice_that_names_it(name, tmp_path):
    before, after, message = TOLD[name]
    (alert,) = alerts_of(before, after, tmp_path)
    assert alert.level == "notice"
    assert f"the way from the output to the loss {message}" in alert.message


@pytest.mark.parametrize("name", SILENT)
def test_nothing_is_told_of_a_loss_that_varies_as_ever(name, tmp_path):
    assert [str(alert) for alert in alerts_of(*SILENT[name], tmp_path)] == []
