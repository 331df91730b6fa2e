"""Which forwards of an armed step are read."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch._dynamo
from torch import nn

from hdi_callback import HeadDiversityMonitor
from hdi_callback.attention import Taps, find_attention
from hdi_callback.attention.capture.sampling import shared_out
from tests.attention.test_capture import inputs_of_projections, tap, tokens
from tests.models import LAYERS, Checkpointed, Classifier


def model_of(**options) -> Classifier:
    torch.manual_seed(0)
    return Classifier(**options)


def captured(taps: Taps, name: str = LAYERS[0]) -> torch.Tensor:
    return taps.captures[name].outputs.flatten(1)


def truth(model: nn.Module, *batches: torch.Tensor, name: str = LAYERS[0]) -> torch.Tensor:
    return torch.cat([inputs_of_projections(model, x)[name].flatten(0, 1) for x in batches])


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_rollout_without_gradients_is_not_captured_beside_the_training_forward(guard, is_first):
    model, rollout, trained = model_of(), tokens(5, seed=1), tokens(3, seed=2)

    def act():
        with guard():
            model.eval()
            model(rollout)
            model.train()

    with tap(model) as taps:
        taps.arm()
        if is_first:
            act()
        loss = model(trained).sum()
        if not is_first:
            act()
        loss.backward()
        found = captured(taps).clone()
    assert torch.equal(found, truth(model, trained))


def test_a_forward_with_autograd_that_no_backward_reaches_is_not_captured():
    model, metric, trained = model_of(), tokens(5, seed=1), tokens(3, seed=2)
    with tap(model) as taps:
        taps.arm()
        model(metric)
        model(trained).sum().backward()
        model(metric)
        found = captured(taps).clone()
    assert torch.equal(found, truth(model, trained))


def test_a_forward_that_raised_and_was_run_again_is_read_once():
    model, x = model_of(), tokens()
    failures = [RuntimeError("once")]

    def fail(*_):
        if failures:
            raise failures.pop()

    model.head.register_forward_pre_hook(fail)
    with tap(model) as taps:
        taps.arm()
        with pytest.raises(RuntimeError, match="once"):
            model(x)
        model(x).sum().backward()
        assert taps.captures[LAYERS[0]].num_tokens == 36


def test_with_training_only_forwards_without_autograd_are_absent_with_the_reason():
    model = model_of()
    with tap(model) as taps:
        taps.arm(training_only=True)
        with torch.no_grad():
            model(tokens())
        assert dict(taps.captures) == {}
        assert "ran only without autograd" in taps.absent[LAYERS[0]]
        taps.arm()
        with torch.no_grad():
            model(tokens())
        assert len(taps.captures) == 2, "of a model that is only looked at"


def test_a_teacher_is_absent_and_its_student_is_read():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.student = model_of()
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)

        def forward(self, x):
            with torch.no_grad():
                target = self.teacher(x)
            return (self.student(x) - target).square().sum()

    model = Pair()
    with tap(model) as taps:
        taps.arm()
        (model(tokens()) + sum(p.sum() for p in model.student.parameters())).backward()
        assert set(taps.captures) == {f"student.{name}" for name in LAYERS}
        assert set(taps.absent) == {f"teacher.{name}" for name in LAYERS}


def test_frozen_layers_are_captured_if_autograd_is_on():
    model = model_of().requires_grad_(False)
    model.head.requires_grad_(True)
    with tap(model) as taps:
        taps.arm(training_only=True)
        model(tokens()).sum().backward()
        assert torch.equal(captured(taps).clone(), truth(model, tokens()))


@pytest.mark.parametrize("reentrant", [True, False])
def test_accumulated_batches_are_all_read_under_checkpointing(reentrant):
    torch.manual_seed(0)
    model, first, second = Checkpointed(reentrant=reentrant), tokens(3, seed=1), tokens(2, seed=2)
    with tap(model) as taps:
        taps.arm(training_only=True)
        for x in (first, second):
            model(x).sum().backward()
        found = {name: captured(taps, name).clone() for name in LAYERS}
        assert taps.captures[LAYERS[0]].num_sequences == 5
    for name in LAYERS:
        assert torch.equal(found[name], truth(model, first, second, name=name))


def test_a_layer_that_is_used_often_is_read_each_time_and_its_sequences_are_counted_once():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model_of(blocks=1)

        def forward(self, x):
            h = self.inner.embed(x)
            for _ in range(12):
                h = self.inner.blocks[0](h)
            return h

    model = Shared()
    with tap(model) as taps:
        taps.arm()
        model(tokens(3)).sum().backward()
        capture = taps.captures["inner.blocks.0.attn"]
        assert len(capture.outputs) == 12 * 36
        assert capture.num_sequences == 3
        assert capture.lengths == (144,) * 3


def test_several_forwards_share_the_sample_in_proportion_to_their_tokens():
    model = model_of()
    taps = Taps(find_attention(model), max_tokens=100)
    with taps:
        taps.arm()
        for batch in (20, 5, 5):
            model(tokens(batch)).sum().backward()
        capture = taps.captures[LAYERS[0]]
        assert 90 <= len(capture.outputs) <= 100
        assert capture.num_tokens == 360
        of_first = int((capture.sequences < 20).sum()) / len(capture.outputs)
        assert of_first == pytest.approx(2 / 3, abs=0.05)
        for _ in range(50):
            model(tokens(1)).sum().backward()
        assert len(taps.captures[LAYERS[0]].outputs) <= 100
        assert len(taps.captures[LAYERS[0]].sequences.unique()) > 40


@pytest.mark.parametrize("sizes", [[5, 5], [1000, 10], [1] * 300, [0, 7, 10**6]])
def test_shares_of_the_sample_never_exceed_its_limit(sizes):
    shares = shared_out(sizes, 100)
    assert sum(shares) <= 100
    assert all(0 <= share <= size for share, size in zip(shares, sizes))
    assert sum(sizes) > 100 or shares == sizes


def read(monitor, compiled, x) -> dict[str, float]:
    monitor.arm()
    compiled(x).sum().backward()
    return monitor.measure(0).record().scalars(["head_correlation"])


@pytest.mark.parametrize("is_armed_first", [True, False])
def test_a_run_goes_on_without_readings_if_recompilation_is_forbidden(is_armed_first):
    torch._dynamo.reset()
    model = model_of()
    with HeadDiversityMonitor(model, metrics=["head_correlation"], check_heads=False) as monitor:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        if is_armed_first:
            expected = read(monitor, compiled, tokens())
        else:
            compiled(tokens()).sum().backward()
        try:
            torch.compiler.set_stance("fail_on_recompile")
            for _ in range(2):
                compiled(tokens()).sum().backward()
                if is_armed_first:
                    assert read(monitor, compiled, tokens()) == pytest.approx(expected, abs=1e-6)
                    continue
                monitor.arm()
                compiled(tokens()).sum().backward()
                monitor._taps.disarm()
                assert monitor._taps.is_limited
                assert read_quietly(monitor) == {}
        finally:
            torch.compiler.set_stance("default")
    torch._dynamo.reset()


def read_quietly(monitor) -> dict[str, float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitor.warn_once, "warn", lambda *_: None)
        record = monitor.measure(0).record()
    assert all("graph of their own" in record.absent[f"head outputs/{name}"] for name in LAYERS)
    return record.scalars(["head_correlation"])


def trained_at_the_limit(is_watched: bool) -> tuple[list[float], list[torch.Tensor], list]:
    """Train blocks that are compiled one by one, each with as many graphs as it may have."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Classifier(blocks=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, records = [], []
    options = {"metrics": ["head_correlation"], "check_heads": False}
    with HeadDiversityMonitor(model, **options) if is_watched else nullcontext() as monitor:
        for place, block in enumerate(model.blocks):
            model.blocks[place] = torch.compile(block, backend="eager", fullgraph=True, dynamic=False)
        for step, length in enumerate(range(3, 11)):
            is_read = is_watched and (step == 0 or step >= 5)  # at first there is room, later there is none
            if is_read:
                monitor.arm()
            elif is_watched:
                monitor.skip_forward()
            loss = model(tokens()[:, :length]).square().mean()
            loss.backward()
            if is_read:
                records.append(monitor.measure(step).record())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    torch._dynamo.reset()
    return losses, [parameter.detach().clone() for parameter in model.parameters()], records


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Head outputs of:hdi_callback.errors.MonitoringWarning")
def test_arming_never_exceeds_the_limit_of_recompilations():
    losses, weights, _ = trained_at_the_limit(is_watched=False)
    watched, others, records = trained_at_the_limit(is_watched=True)
    assert watched == losses
    assert all(torch.equal(one, other) for one, other in zip(weights, others, strict=True))
    names = [f"blocks.{place}.attn" for place in range(3)]
    kinds = []
    for record in records:
        assert set(record.layers) == set(names)
        are_read = ["head_correlation" in record.layers[name].values for name in names]
        reasons = [record.absent.get(f"head outputs/{name}", "") for name in names]
        # Read, or absent for the reason that it is.
        assert [("graph of their own" in reason) != is_read for reason, is_read in zip(reasons, are_read)] == [True] * 3
        kinds.append(all(are_read))
    assert kinds[0]
    assert not kinds[-1]
