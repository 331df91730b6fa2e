"""The watch in a loop of one's own: when it reads, what it leaves, what it changes, and what it says of misuse."""

from __future__ import annotations

import copy
import importlib
import time
import warnings
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter

from hdi_callback import HeadDiversityMonitor, replay, watch_heads
from hdi_callback.core import diversity_penalty, head_covariance, head_diversity
from hdi_callback.errors import HDIWarning, HeadCollapseWarning, MisconfigurationError, MonitoringWarning
from hdi_callback.monitoring.alerts import Alerts
from hdi_callback.monitoring.history import read_lines, read_records
from hdi_callback.monitoring.interventions import DiversityPenalty, SaveCheckpoint, ScaleLearningRate, StopTraining
from hdi_callback.monitoring.monitor.weights import WeightReader
from hdi_callback.monitoring.rules.replay import read_alerts
from hdi_callback.monitoring.session.reader import Reader
from hdi_callback.monitoring.session.schedule import Schedule
from tests.histories import readings
from tests.models import CLASSES, HEADS, LAYERS, LENGTH, Classifier
from tests.wandb_files import read_wandb

QUIET = {"verbose": False}


def batch(step: int, part: int = 0, size: int = 4) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(16, (size, LENGTH), generator=torch.Generator().manual_seed(100 * step + part))
    return tokens, tokens.sum(1) % CLASSES


def classifier(dropout: float = 0.0) -> Classifier:
    torch.manual_seed(0)
    return Classifier(dropout=dropout)


def adam(model: nn.Module, **options) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, **options)


def loss_of(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens), labels)


def key_heads(model: Classifier, block: int = 0) -> Tensor:
    return model.blocks[block].attn.k_proj.weight.unflatten(0, (HEADS, -1))


@torch.no_grad()
def collapse(model: Classifier, step: int, start: int = 3, rate: float = 0.3) -> None:
    """Pull the key heads of the first layer together, from a step on."""
    if step >= start:
        heads = key_heads(model)
        heads += rate * (heads[:1] - heads)


@dataclass
class Trained:
    """What a training leaves behind."""

    model: Classifier
    optimizer: torch.optim.Optimizer
    losses: list[Tensor] = field(default_factory=list)

    def state(self) -> list[Tensor]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.losses, *(p.detach() for p in self.model.parameters()), *moments, torch.get_rng_state()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    assert len(left) == len(right) > 20
    return all(torch.equal(a, b) for a, b in zip(left, right))


def train(
    heads, trained: Trained, steps: int = 12, *, start: int = 0, accumulate: int = 1, each_part=False, collapses=False
):
    """An ordinary loop; without a watch if `heads` is None."""
    scope = nullcontext if heads is None else heads.step
    for step in range(start, steps):
        with nullcontext() if each_part else scope():
            for part in range(accumulate):
                with scope() if each_part else nullcontext():
                    loss = loss_of(trained.model, *batch(step, part)) / accumulate
                    loss.backward()
                    trained.losses.append(loss.detach())
                    if part == accumulate - 1:
                        nn.utils.clip_grad_norm_(trained.model.parameters(), 0.5)
                        trained.optimizer.step()
                        trained.optimizer.zero_grad()
        if collapses:
            collapse(trained.model, step)
        if heads is not None and heads.should_stop:
            break
    return trained


def fresh(dropout: float = 0.0) -> Trained:
    model = classifier(dropout)
    return Trained(model, adam(model))


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in EventAccumulator(str(folder)).Reload().Scalars(tag)]


# --- when it reads, and what


@pytest.mark.parametrize("each_part", [False, True], ids=["around all parts", "around each part"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_reading_has_the_weights_of_its_step_and_the_outputs_of_its_forwards(tmp_path, accumulate, each_part):
    trained, weights, outputs = fresh(), {}, {}
    attention = trained.model.blocks[1].attn

    def keep(module, args):
        step = len(trained.losses) // accumulate
        if step not in weights:  # the first forward of the step
            weights[step] = key_heads(trained.model, 1).detach().clone()
            outputs[step] = ([], attention.out_proj.weight.detach().clone())
        if not outputs[step][0] or not each_part:  # where each part is enclosed, the first is read
            outputs[step][0].append(args[0].detach().flatten(0, 1).unflatten(-1, (HEADS, -1)))

    attention.out_proj.register_forward_pre_hook(keep)
    with watch_heads(trained.model, trained.optimizer, every_n_steps=5, log_dir=tmp_path, **QUIET) as heads:
        train(heads, trained, accumulate=accumulate, each_part=each_part)
    assert heads.global_step == 12
    records = read_records(heads.history_path)
    assert [record.step for record in records] == [0, 5, 10, 12]
    assert list(records[0].layers) == LAYERS
    for record in records[:-1]:
        values = record.layers[LAYERS[1]].values
        assert values["hdi"] == pytest.approx(float(head_diversity(weights[record.step]).index), abs=1e-6)
        captured, projection = outputs[record.step]
        truth = head_covariance(torch.cat(captured), projection.mT.unflatten(0, (HEADS, -1)))
        assert values["head_covariance"] == pytest.approx(float(truth.covariance), rel=1e-4, abs=1e-8)
    last = records[-1].layers[LAYERS[1]].values
    assert "head_covariance" not in last, "no forward follows the last step"
    assert last["hdi"] == pytest.approx(float(head_diversity(key_heads(trained.model, 1).detach()).index), abs=1e-6)


class SharpnessAware(torch.optim.Optimizer):
    """Moves the weights uphill before it calls the closure, and steps from where they were (Foret et al., 2021)."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=lr)

    @torch.no_grad()
    def step(self, closure):
        self.climb()
        with torch.enable_grad():
            closure()
        self.return_and_step()

    @torch.no_grad()
    def climb(self):
        self.kept = [one.detach().clone() for one in self.param_groups[0]["params"]]
        for one in self.param_groups[0]["params"]:
            one += 0.1 * one.grad.sign()

    @torch.no_grad()
    def return_and_step(self):
        for one, kept in zip(self.param_groups[0]["params"], self.kept):
            one.copy_(kept)
        self.base_optimizer.step()


def lbfgs(parameters):
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=4, line_search_fn="strong_wolfe")


def step_by_closure(model, optimizer, step, losses):
    def closure():
        optimizer.zero_grad()
        losses.append(loss_of(model, *batch(step)))
        losses[-1].backward()
        return losses[-1]

    if isinstance(optimizer, SharpnessAware):
        closure()
    optimizer.step(closure)


def step_by_name(model, optimizer, step, losses):
    original = optimizer.step
    optimizer.step = lambda closure: original(closure=closure)
    step_by_closure(model, optimizer, step, losses)
    del optimizer.step


class OnItsBaseClass(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def climb_by_hand(model, optimizer, step, losses):
    for part in (optimizer.climb, optimizer.return_and_step):
        losses.append(loss_of(model, *batch(step)))
        losses[-1].backward()
        part()
        optimizer.zero_grad()


def step_plainly(model, optimizer, step, losses):
    losses.append(loss_of(model, *batch(step)))
    losses[-1].backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("make", "take_step"),
    [(SharpnessAware, climb_by_hand), (OnItsBaseClass, step_plainly), (OnItsBaseClass, step_by_closure)],
)
def test_nested_optimizer_steps_count_as_one_step(tmp_path, make, take_step):
    torch.optim.SGD(classifier().parameters())  # from now on SGD itself calls hooks, and so does what it is the base of
    model, twin, losses, losses_alone = classifier(), classifier(), [], []
    optimizer, alone = make(model.parameters(), lr=0.1), make(twin.parameters(), lr=0.1)
    weights = []
    with watch_heads(model, optimizer, every_n_steps=1, log_dir=tmp_path, **QUIET) as heads:
        for step in range(4):
            weights.append(key_heads(model).detach().clone())
            with heads.step():
                take_step(model, optimizer, step, losses)
    for step in range(4):
        take_step(twin, alone, step, losses_alone)
    assert heads.global_step == 4
    assert [float(one) for one in losses] == [float(one) for one in losses_alone]
    assert same([*model.parameters()], [*twin.parameters()])
    records = read_records(heads.history_path)
    for record, heads_then in zip(records, weights):
        values = record.layers[LAYERS[0]].values
        assert values["hdi"] == pytest.approx(float(head_diversity(heads_then).index), abs=1e-6)
        assert "head_covariance" in values


def test_a_step_of_another_optimizer_is_reported(tmp_path):
    trained = fresh()
    with watch_heads(trained.model, trained.optimizer, every_n_steps=1, log_dir=tmp_path, **QUIET) as heads:
        train(heads, trained, steps=2)
        trained.optimizer = torch.optim.SGD(trained.model.parameters(), lr=0.1)
        with pytest.warns(
            MonitoringWarning, match="changes by another optimizer or by your own code are neither count"
        ):
            train(heads, trained, start=2, steps=3)
        train(heads, trained, start=3, steps=4)
    assert heads.global_step == 2


def test_lazy_parameters_are_trained_as_without_the_monitor(tmp_path):
    def run(is_watched: bool) -> list[Tensor]:
        trained = fresh()
        trained.model.head = nn.LazyLinear(CLASSES)
        trained.optimizer = torch.optim.AdamW([*trained.model.head.parameters(), *trained.model.blocks.parameters()])
        if not is_watched:
            return train(None, trained).state()
        with watch_heads(trained.model, trained.optimizer, every_n_steps=3, log_dir=tmp_path, **QUIET) as heads:
            train(heads, trained)
        assert [record.step for record in read_records(heads.history_path)] == [0, 3, 6, 9, 12]
        return trained.state()

    assert same(run(is_watched=False), run(is_watched=True))


class Lookahead:
    """Calls the step of the optimizer that it holds, and no hooks of its own."""

    def __init__(self, base):
        self.base = base


class CallsNoHooks(torch.optim.Optimizer):
    def __init__(self, base):
        self.base = base

    def step(self):
        self.base.step()


@pytest.mark.parametrize("wrapper", [Lookahead, CallsNoHooks])
def test_an_optimizer_wrapper_without_hooks_is_refused_with_the_inner_optimizer_named(tmp_path, wrapper):
    trained = fresh()
    says = r"calls no hooks. It holds AdamW as `base`: write watch_heads\(model, optimizer.base\)"
    with pytest.raises(MisconfigurationError, match=says):
        watch_heads(trained.model, wrapper(trained.optimizer), log_dir=tmp_path, **QUIET)


@pytest.mark.parametrize("take_step", [step_by_closure, step_by_name])
@pytest.mark.parametrize("make", [lbfgs, torch.optim.SGD, SharpnessAware])
def test_a_step_with_a_closure_is_read_at_its_first_forward(tmp_path, make, take_step):
    model, twin = classifier(dropout=0.1), classifier(dropout=0.1)
    weights, outputs, losses, losses_alone = {}, {}, [], []
    optimizer, alone = make(model.parameters()), make(twin.parameters())
    attention, steps = model.blocks[1].attn, []

    def keep(module, args):
        if steps[-1] not in weights:
            weights[steps[-1]] = key_heads(model, 1).detach().clone()
            heads = args[0].detach().flatten(0, 1).unflatten(-1, (HEADS, -1))
            outputs[steps[-1]] = head_covariance(heads, module.weight.detach().mT.unflatten(0, (HEADS, -1)))

    attention.out_proj.register_forward_pre_hook(keep)
    torch.manual_seed(1)
    with watch_heads(model, optimizer, every_n_steps=1, log_dir=tmp_path, **QUIET) as heads:
        for step in range(3):
            steps.append(step)
            with heads.step():
                take_step(model, optimizer, step, losses)
    torch.manual_seed(1)
    for step in range(3):
        take_step(twin, alone, step, losses_alone)
    assert [float(one) for one in losses] == [float(one) for one in losses_alone]
    assert same([*model.parameters()], [*twin.parameters()])
    records = read_records(heads.history_path)
    assert [record.step for record in records] == [0, 1, 2, 3]
    for record in records[:-1]:
        values = record.layers[LAYERS[1]].values
        assert values["hdi"] == pytest.approx(float(head_diversity(weights[record.step]).index), abs=1e-6)
        assert values["head_covariance"] == pytest.approx(float(outputs[record.step].covariance), rel=1e-4, abs=1e-8)


def test_tensorboard_holds_what_the_history_holds(tmp_path):
    trained = fresh()
    options = {"every_n_steps": 4, "log_dir": tmp_path, "tensorboard": True}
    with watch_heads(trained.model, trained.optimizer, **options) as heads:
        train(heads, trained, steps=10)
    records = read_records(heads.history_path)
    assert heads.history_path == tmp_path / "hdi" / "history.jsonl"
    for metric in ("hdi", "hdi_worst_pair", "head_correlation"):
        for layer in LAYERS:
            kept = [(r.step, r.layers[layer].values[metric]) for r in records if metric in r.layers[layer].values]
            written = scalars(tmp_path / "hdi", f"{metric}/{layer}")
            assert [step for step, _ in written] == [step for step, _ in kept] != []
            assert [value for _, value in written] == pytest.approx([value for _, value in kept], rel=1e-6)
    assert heads.latest["hdi/min"] == pytest.approx(min(r.values["hdi"] for r in records[-1].layers.values()))


def test_a_writer_of_the_user_stays_open(tmp_path):
    trained, writer = fresh(), SummaryWriter(tmp_path / "mine")
    with watch_heads(trained.model, trained.optimizer, tensorboard=writer, history=False, **QUIET) as heads:
        train(heads, trained, steps=2)
    writer.add_scalar("loss", 1.0, 7)
    writer.close()
    assert heads.history_path is None
    assert [step for step, _ in scalars(tmp_path / "mine", "hdi/mean")] == [0, 2]
    assert scalars(tmp_path / "mine", "loss") == [(7, 1.0)]


def test_wandb_loses_no_row_of_the_user(tmp_path):
    import wandb

    run = wandb.init(mode="offline", dir=tmp_path, project="test", settings=wandb.Settings(silent=True))
    trained = fresh()
    options = {"every_n_steps": 2, "wandb": run, "history": False}
    with watch_heads(trained.model, trained.optimizer, **options, **QUIET) as heads:
        for step in range(8):
            run.log({"loss": float(step)}, step=step)
            train(heads, trained, start=step, steps=step + 1)
            run.log({"rate": 0.1 * step}, step=step)  # after the reading, in the same row
    run.finish()
    wandb.teardown()  # waits until the file is written, which `finish` does not
    reported = read_wandb(tmp_path)
    for tag in ("loss", "rate"):
        assert [row["_step"] for row in reported.history if tag in row] == list(range(8))
    assert [row["hdi_step"] for row in reported.history if "hdi/mean" in row] == [0, 2, 4, 6, 8]
    axes = {metric["glob_name"] or metric["name"]: metric.get("step_metric") for metric in reported.metrics}
    assert {"hdi/*", "head_correlation/*", rf"hdi/{LAYERS[0]}".replace(".", r"\.")} <= set(axes), axes
    assert reported.summary[f"hdi/{LAYERS[0]}"]["min"] == min(
        row[f"hdi/{LAYERS[0]}"] for row in reported.history if "hdi/mean" in row
    )


def test_several_optimizers_make_one_step(tmp_path):
    model = classifier()
    inner = [parameter for name, parameter in model.named_parameters() if "attn" in name and parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if all(parameter is not one for one in inner)]
    first, second = torch.optim.SGD(inner, lr=0.1), torch.optim.AdamW(others, lr=0.01)
    weights = {}
    with watch_heads(model, [second, first], every_n_steps=2, log_dir=tmp_path, **QUIET) as heads:
        for step in range(5):
            weights[step] = key_heads(model).detach().clone()
            with heads.step():
                loss_of(model, *batch(step)).backward()
                first.step()
                second.step()
                model.zero_grad()
    assert heads.global_step == 5
    for record in read_records(heads.history_path)[:-1]:
        index = float(head_diversity(weights[record.step]).index)
        assert record.layers[LAYERS[0]].values["hdi"] == pytest.approx(index, abs=1e-6), "read before either stepped"


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_step_that_the_gradient_scaler_skips_is_not_counted(tmp_path, is_fused):
    def run(heads, model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
        for step in range(6):
            with nullcontext() if heads is None else heads.step():
                loss = loss_of(model, *batch(step))
                scaler.scale(loss * (float("inf") if step in (1, 4) else 1)).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        return [p.detach() for p in model.parameters()], scaler.get_scale()

    plain, watched = classifier(), classifier()
    truth, scale = run(None, plain, adam(plain, fused=is_fused))
    optimizer = adam(watched, fused=is_fused)
    with watch_heads(watched, optimizer, every_n_steps=2, log_dir=tmp_path, **QUIET) as heads:
        weights, same_scale = run(heads, watched, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(truth, weights))
    assert scale == same_scale == 2.0**8
    # A fused optimizer decides on the device whether it steps, and nobody waits for the answer.
    assert readings(heads.history_path) == ([0, 2, 4, 6] if is_fused else [0, 2, 4])
    assert heads.global_step == (6 if is_fused else 4)


# --- what it leaves alone


@pytest.mark.parametrize(("accumulate", "each_part"), [(1, False), (3, False), (3, True)])
def test_losses_weights_optimizer_and_random_state_are_the_same_with_and_without_it(tmp_path, accumulate, each_part):
    plain = train(None, fresh(dropout=0.2), accumulate=accumulate).state()
    trained = fresh(dropout=0.2)
    options = {"every_n_steps": 2, "log_dir": tmp_path, "tensorboard": True}
    with watch_heads(trained.model, trained.optimizer, **options, **QUIET) as heads:
        train(heads, trained, accumulate=accumulate, each_part=each_part)
    assert same(plain, trained.state())
    assert not any(module._forward_pre_hooks for module in trained.model.modules())
    assert not trained.optimizer._optimizer_step_pre_hooks
    assert not trained.optimizer._optimizer_step_post_hooks


def test_evaluation_between_steps_is_neither_read_nor_touched(tmp_path):
    """Torch's encoder takes a path of its own in evaluation, unless a hook is there."""

    def run(is_watched: bool):
        torch.manual_seed(0)
        block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        model = nn.Sequential(nn.Embedding(16, 32), nn.TransformerEncoder(block, 2, enable_nested_tensor=False))
        optimizer, paths = adam(model), []
        heads = watch_heads(model, optimizer, every_n_steps=2, log_dir=tmp_path, **QUIET) if is_watched else None
        with nullcontext() if heads is None else heads:
            for step in range(5):
                with nullcontext() if heads is None else heads.step():
                    model(batch(step)[0]).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                model.eval()
                with torch.no_grad(), torch.profiler.profile() as profiled:
                    model(batch(99)[0])
                paths.append({event.key for event in profiled.key_averages() if "encoder_layer_fwd" in event.key})
                model.train()
        return paths, [p.detach() for p in model.parameters()]

    paths, weights = run(is_watched=False)
    assert all(paths), "evaluation takes torch's fast path"
    watched_paths, watched_weights = run(is_watched=True)
    assert watched_paths == paths
    assert all(torch.equal(a, b) for a, b in zip(weights, watched_weights))
    assert readings(tmp_path / "hdi" / "history.jsonl") == [0, 2, 4, 5]


@pytest.mark.parametrize(
    "broken",
    ["hdi_callback.monitoring.monitor.HeadDiversityMonitor.measure", "hdi_callback.monitoring.history.History.write",
     "hdi_callback.monitoring.session.session.Session.before_forward",
     "hdi_callback.monitoring.session.session.Session.after_step",
     "hdi_callback.monitoring.session.session.place_history"],
)  # fmt: skip
def test_an_error_in_the_monitor_costs_one_warning_and_training_is_unchanged(tmp_path, broken):
    plain = train(None, fresh()).state()
    trained = fresh()
    with warnings.catch_warnings(record=True) as caught, mock.patch(broken, side_effect=RuntimeError("broken")):
        warnings.simplefilter("always")
        with watch_heads(trained.model, trained.optimizer, every_n_steps=3, log_dir=tmp_path, **QUIET) as heads:
            train(heads, trained)
    assert same(plain, trained.state())
    ours = [str(item.message) for item in caught if issubclass(item.category, HDIWarning)]
    assert len(ours) == 1, ours
    assert "broken" in ours[0]
    assert not any(module._forward_pre_hooks for module in trained.model.modules())


def test_a_failed_step_is_abandoned_and_its_reading_is_taken_in_the_next(tmp_path):
    trained = fresh()
    with watch_heads(trained.model, trained.optimizer, every_n_steps=5, log_dir=tmp_path, **QUIET) as heads:
        with pytest.raises(ZeroDivisionError), heads.step():
            loss_of(trained.model, *batch(50, size=9))
            raise ZeroDivisionError
        train(heads, trained)
    assert readings(heads.history_path) == [0, 5, 10, 12]
    alone = fresh()
    with HeadDiversityMonitor(alone.model) as monitor:
        monitor.arm()
        alone.model(batch(0)[0])
        truth = monitor.measure(0).record()
    first = read_records(heads.history_path)[0]
    for name in LAYERS:
        assert first.layers[name].values["head_covariance"] == pytest.approx(
            truth.layers[name].values["head_covariance"], rel=1e-6
        ), "of the forward that was trained on, not of the one that failed"


def test_an_interrupted_run_keeps_its_readings_and_leaves_no_hook(tmp_path):
    trained = fresh()
    with pytest.raises(KeyboardInterrupt), watch_heads(
        trained.model, trained.optimizer, every_n_steps=2, log_dir=tmp_path, tensorboard=True, **QUIET
    ) as heads:  # fmt: skip
        train(heads, trained, steps=5)
        raise KeyboardInterrupt
    assert readings(heads.history_path) == [0, 2, 4]
    assert [step for step, _ in scalars(tmp_path / "hdi", "hdi/mean")] == [0, 2, 4]
    assert not any(module._forward_pre_hooks for module in trained.model.modules())


INTERRUPTED = {
    "finding out whether a reading is due": (Schedule, "is_due"),
    "arming": (HeadDiversityMonitor, "arm"),
    "measuring": (WeightReader, "measure"),
    "judging": (Alerts, "judge"),
    "the last reading": (Reader, "finish"),
}


@pytest.mark.parametrize("place", INTERRUPTED)
def test_a_loop_that_goes_on_after_an_interruption_reads_every_step(tmp_path, place):
    trained, (owner, name), steps = fresh(), INTERRUPTED[place], 0
    real, calls = getattr(owner, name), iter(range(10**6))

    def interrupted(*args, **kwargs):
        if next(calls) == (0 if name == "finish" else 2):
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    heads = watch_heads(trained.model, trained.optimizer, every_n_steps=1, log_dir=tmp_path, **QUIET)
    with mock.patch.object(owner, name, interrupted):
        for step in range(6):
            with suppress(KeyboardInterrupt), heads.step():
                loss_of(trained.model, *batch(step)).backward()
                trained.optimizer.step()
                steps += 1
            trained.optimizer.zero_grad()
            assert not any(module._forward_pre_hooks for module in trained.model.modules())
        with suppress(KeyboardInterrupt):
            heads.finish()
    assert heads.global_step == steps >= 5
    last = steps if name == "finish" else steps + 1
    assert readings(heads.history_path) == list(range(last))
    assert not any(module._forward_pre_hooks for module in trained.model.modules())


# --- compilation


@pytest.mark.some_slow(quick=1)
@pytest.mark.parametrize("way", ["torch.compile(model)", "model.compile()"])
def test_a_compiled_model_is_read_at_every_due_step_with_evaluations_between(tmp_path, dynamo, way):
    def run(is_watched: bool):
        torch._dynamo.reset()
        dynamo.clear()
        model = classifier()
        heads = None
        compiled = torch.compile(model, backend="eager") if "(model)" in way else model
        if compiled is model:
            model.compile(backend="eager")
        optimizer = adam(model)
        if is_watched:
            heads = watch_heads(compiled, optimizer, every_n_steps=2, log_dir=tmp_path, **QUIET)
        with nullcontext() if heads is None else heads:
            for step in range(6):
                with nullcontext() if heads is None else heads.step():
                    loss_of(compiled, *batch(step)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                compiled.eval()
                with torch.no_grad():
                    compiled(batch(90)[0])
                compiled.train()
        assert not dynamo["graph_break"]
        return dynamo["stats"]["unique_graphs"], [p.detach() for p in model.parameters()]

    graphs, weights = run(is_watched=False)
    graphs_watched, weights_watched = run(is_watched=True)
    assert graphs_watched <= graphs + 1, "one graph that captures"
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_watched))
    records = read_records(tmp_path / "hdi" / "history.jsonl")
    assert [r.step for r in records if "head_covariance" in r.layers[LAYERS[1]].values] == [0, 2, 4]
    assert list(records[0].layers) == LAYERS


@pytest.mark.slow
@pytest.mark.parametrize("prepares", [True, False])
def test_a_compiled_optimizer_is_read_only_if_the_loop_calls_the_monitor_before_its_step_else_warns(
    tmp_path, dynamo, prepares
):
    def run(heads, trained):
        step_of = torch.compile(trained.optimizer.step, backend="eager")
        for step in range(6):
            with nullcontext() if heads is None else heads.step():
                loss = loss_of(trained.model, *batch(step))
                loss.backward()
                trained.losses.append(loss.detach())
                if heads is not None and prepares:
                    heads.before_optimizer_step()
                step_of()
                trained.optimizer.zero_grad()
        return trained.state(), dynamo["stats"]["unique_graphs"]

    plain, graphs = run(None, fresh())
    torch._dynamo.reset()
    dynamo.clear()
    trained = fresh()
    options = {"every_n_steps": 2, "log_dir": tmp_path, **QUIET}
    expected = nullcontext() if prepares else pytest.warns(MonitoringWarning, match="step is compiled")
    with expected, watch_heads(trained.model, trained.optimizer, **options) as heads:
        watched, graphs_watched = run(heads, trained)
    assert same(plain, watched)
    assert graphs_watched == graphs
    assert heads.global_step == 6
    assert readings(heads.history_path) == ([0, 2, 4, 6] if prepares else [6])


# --- interventions


def test_the_loop_is_asked_to_stop_and_its_alerts_are_those_of_the_history(tmp_path, capsys):
    trained, reported = fresh(), []
    options = {"every_n_steps": 2, "log_dir": tmp_path, "interventions": [StopTraining()], "on_alert": reported.append}
    with pytest.warns(HeadCollapseWarning), watch_heads(trained.model, trained.optimizer, **options) as heads:
        train(heads, trained, steps=60, collapses=True)
        active = heads.active_alerts
    kept = read_alerts(heads.history_path)
    assert kept == replay(heads.history_path)
    assert [alert.message for alert in kept] == [alert.message for alert in reported] != []
    (critical,) = [alert for alert in kept if alert.level == "critical"]
    assert heads.global_step == critical.step + 1 < 60
    assert [alert.layer for alert in active] == [LAYERS[0]]
    printed = capsys.readouterr().out
    assert printed.startswith("hdi_callback watches 2 attention layers")
    assert printed.count(critical.message) == 1
    assert "StopTraining stopped the training" in printed


def test_the_learning_rate_is_that_of_a_run_that_scales_it_by_hand(tmp_path):
    options = {"every_n_steps": 2, "interventions": [ScaleLearningRate(0.1)], "thresholds": {"*": {"mean": 0.2}}}
    trained = fresh()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadCollapseWarning)
        with watch_heads(trained.model, trained.optimizer, log_dir=tmp_path, **options, **QUIET) as heads:
            train(heads, trained, collapses=True)
    began = read_alerts(heads.history_path)[0].step + 1
    assert 3 < began < 10
    twin = train(None, fresh(), steps=began, collapses=True)
    for group in twin.optimizer.param_groups:
        group["lr"] *= 0.1
    train(None, twin, start=began, collapses=True)
    assert all(torch.equal(a, b) for a, b in zip(twin.model.parameters(), trained.model.parameters()))
    assert trained.optimizer.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize("scaling", ["no scaler", "scaler", "scaler and fused optimizer"])
@pytest.mark.parametrize("is_clipped", [False, True])
def test_a_step_with_the_penalty_equals_a_step_with_the_penalty_in_the_loss(tmp_path, scaling, is_clipped):
    def run(heads, model, optimizer, penalised_from):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaling != "no scaler")
        for step in range(10):
            with nullcontext() if heads is None else heads.step():
                loss = loss_of(model, *batch(step))
                if step >= penalised_from:
                    loss = loss + 0.1 * diversity_penalty(key_heads(model))
                scaler.scale(loss).backward()
                if is_clipped:
                    scaler.unscale_(optimizer)
                    if heads is not None:
                        heads.before_optimizer_step()
                    nn.utils.clip_grad_norm_(model.parameters(), 0.2)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            if step < 5:
                collapse(model, step)

    def made():
        model = classifier()
        if scaling == "scaler and fused optimizer":
            return model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = made()
    options = {"every_n_steps": 2, "interventions": [DiversityPenalty(0.1)], "thresholds": {"*": {"mean": 0.2}}}
    with watch_heads(model, optimizer, log_dir=tmp_path, **options, **QUIET) as heads:
        run(heads, model, optimizer, penalised_from=99)
    (alert,) = read_alerts(heads.history_path)
    twin, other = made()
    run(None, *(twin, other), penalised_from=alert.step + 1)
    untouched, another = made()
    run(None, *(untouched, another), penalised_from=99)
    torch.testing.assert_close(key_heads(model), key_heads(twin), rtol=1e-4, atol=1e-6)
    assert (key_heads(model) - key_heads(untouched)).abs().max() > 1e-4


# --- resumption


def save_by_hand(heads, trained: Trained, path: Path) -> None:
    state = {"model": trained.model.state_dict(), "optimizer": trained.optimizer.state_dict()}
    torch.save({**state, "heads": heads.state_dict()}, path)


def load_by_hand(heads, path: Path, trained: Trained) -> int:
    state = torch.load(path, weights_only=True)
    trained.model.load_state_dict(state["model"])
    trained.optimizer.load_state_dict(state["optimizer"])
    heads.load_state_dict(state["heads"])
    return state["heads"]["step"]


def test_a_run_resumed_within_a_second_is_shown_from_its_checkpoint_on(tmp_path, monkeypatch):
    # TensorBoard orders files of one second by a count that is compared as text: 10 comes before 9.
    writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
    monkeypatch.setattr(writer, "_global_uid", type(writer._global_uid)(9))
    trained = fresh()
    options = {"every_n_steps": 1, "log_dir": tmp_path, "tensorboard": True, "alerts": None, "figures_every": 0}
    with watch_heads(trained.model, trained.optimizer, **options | {"verbose": False}) as heads:
        time.sleep(1 - time.time() % 1)  # both files are opened in one second, if nothing keeps them apart
        train(heads, trained, steps=1)
        save_by_hand(heads, trained, tmp_path / "at1.pt")
        train(heads, trained, start=1, steps=3)
        step = load_by_hand(heads, tmp_path / "at1.pt", trained)
        train(heads, trained, start=step, steps=4)
    assert [step for step, _ in scalars(tmp_path / "hdi", "hdi/mean")] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("is_new_process", [True, False], ids=["a new run", "back in the same run"])
def test_a_run_resumes_without_a_gap_or_a_double_point(tmp_path, is_new_process):
    options = {"every_n_steps": 2, "log_dir": tmp_path, "tensorboard": True, **QUIET}
    first = fresh()
    heads = watch_heads(first.model, first.optimizer, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadCollapseWarning)
        train(heads, first, steps=5, collapses=True)
        save_by_hand(heads, first, tmp_path / "at5.pt")
        train(heads, first, start=5, steps=9, collapses=True)  # beyond the checkpoint, and lost
        second = first
        if is_new_process:
            heads.close()
            second = fresh()
            heads = watch_heads(second.model, second.optimizer, **options)
        step = load_by_hand(heads, tmp_path / "at5.pt", second)
        assert step == heads.global_step == 5
        with heads:
            train(heads, second, start=step, collapses=True)
    (history,) = (tmp_path / "hdi").glob("*.jsonl")
    assert heads.history_path == history
    assert readings(history) == [0, 2, 4, 6, 8, 10, 12]
    assert [step for step, _ in scalars(tmp_path / "hdi", "hdi/mean")] == [0, 2, 4, 6, 8, 10, 12]
    assert [alert.level for alert in read_alerts(history)] == ["warning", "critical"]
    assert read_alerts(history) == replay(history)


def test_a_checkpoint_that_an_intervention_saves_is_resumed_without_saving_it_again(tmp_path):
    def run(resume: Path | None):
        trained, saved = fresh(), []

        def save(name: str) -> Path:
            saved.append(tmp_path / f"{name}.pt")
            save_by_hand(heads, trained, saved[-1])
            return saved[-1]

        heads = watch_heads(
            trained.model, trained.optimizer, every_n_steps=2, log_dir=tmp_path, save_checkpoint=save,
            interventions=[SaveCheckpoint(at_most=1)], **QUIET,
        )  # fmt: skip
        start = 0 if resume is None else load_by_hand(heads, resume, trained)
        with warnings.catch_warnings(), heads:
            warnings.simplefilter("ignore", HeadCollapseWarning)
            train(heads, trained, start=start, collapses=True)
        return heads, saved

    heads, (saved,) = run(None)
    warning = read_alerts(heads.history_path)[0]
    assert torch.load(saved, weights_only=True)["heads"]["step"] == warning.step + 1
    (done,) = [line for line in read_lines(heads.history_path) if line["kind"] == "intervention"]
    assert done["facts"]["path"] == str(saved)
    resumed, saved_again = run(saved)
    assert saved_again == []
    assert readings(resumed.history_path) == [0, 2, 4, 6, 8, 10, 12]


def test_another_run_in_the_same_folder_gets_a_separate_history(tmp_path):
    paths = []
    for _ in range(2):
        trained = fresh()
        with watch_heads(trained.model, trained.optimizer, log_dir=tmp_path, **QUIET) as heads:
            train(heads, trained, steps=2)
        paths.append(heads.history_path)
    assert paths[0] != paths[1]
    assert [readings(path) for path in paths] == [[0, 2], [0, 2]]


def test_two_runs_in_one_folder_have_separate_tensorboard_directories_that_a_resumption_continues(tmp_path):
    options = {"log_dir": tmp_path, "tensorboard": True, "every_n_steps": 2, **QUIET}
    for _ in range(2):
        trained = fresh()
        with watch_heads(trained.model, trained.optimizer, **options) as heads:
            train(heads, trained, steps=4)
        state = heads.state_dict()
    with watch_heads(trained.model, trained.optimizer, **options) as resumed:
        resumed.load_state_dict(state)
        train(resumed, trained, start=4, steps=8)
    assert [step for step, _ in scalars(tmp_path / "hdi", "hdi/mean")] == [0, 2, 4]
    (first, *_), second = sorted((tmp_path / "hdi-1").glob("*tfevents*")), resumed
    assert [step for step, _ in scalars(first.parent, "hdi/mean")] == [0, 2, 4, 6, 8]
    assert second.history_path == heads.history_path == tmp_path / "hdi" / "history-1.jsonl"
    assert readings(second.history_path) == [0, 2, 4, 6, 8]


# --- misuse


def outside(heads, trained):
    loss_of(trained.model, *batch(0)).backward()
    trained.optimizer.step()


def nested(heads, trained):
    with heads.step():
        train(heads, trained, steps=1)


def around_the_loop(heads, trained):
    with heads.step():
        train(None, trained, steps=3)


def without_a_step(heads, trained):
    with heads.step():
        loss_of(trained.model, *batch(0)).backward()


def after_the_end(heads, trained):
    train(heads, trained, steps=1)
    heads.close()
    train(heads, trained, start=1, steps=2)


def called_outside(heads, trained):
    heads.before_optimizer_step()
    train(heads, trained, steps=1)


@pytest.mark.parametrize(
    ("misuse", "says"),
    [
        (outside, r"step outside of `with heads.step\(\):`"),
        (nested, "within another does nothing"),
        (around_the_loop, r"several steps within one `with heads.step\(\):`"),
        (without_a_step, "The optimizer made no step"),
        (after_the_end, "after the watch was closed"),
        (called_outside, r"`heads.before_optimizer_step\(\)` does nothing outside"),
    ],
)
def test_misuse_in_the_loop_is_reported_once(tmp_path, misuse, says):
    trained = fresh()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with watch_heads(trained.model, trained.optimizer, log_dir=tmp_path, **QUIET) as heads:
            misuse(heads, trained)
            misuse(heads, trained)
    ours = [item for item in caught if issubclass(item.category, HDIWarning)]
    with pytest.warns(MonitoringWarning, match=says):
        warnings.warn_explicit(ours[0].message, None, ours[0].filename, ours[0].lineno)
    assert len(ours) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"every_n_steps": 0}, "every_n_steps"),
        ({"optimizer": "adam"}, "must be a torch optimizer"),
        ({"optimizer": []}, "empty list"),
        ({"interventions": [SaveCheckpoint()]}, "save_checkpoint="),
        ({"interventions": StopTraining()}, r"must be a list, got one StopTraining: write \[StopTraining"),
        ({"tensorboard": "runs/a"}, "must be a SummaryWriter or True"),
        ({"wandb": "project"}, "must be a run"),
        ({"on_alert": "print"}, "on_alert"),
        ({"history": 3}, "history"),
        ({"thresholds": {"nothing.*": {"mean": 0.5}}}, "matches no attention layer"),
    ],
)
def test_invalid_arguments_are_refused_at_once_and_leave_no_hook(arguments, says):
    trained = fresh()
    with pytest.raises(MisconfigurationError, match=says):
        watch_heads(**({"model": trained.model, "optimizer": trained.optimizer, **QUIET} | arguments))
    assert not trained.optimizer._optimizer_step_pre_hooks
    assert not any(module._forward_pre_hooks for module in trained.model.modules())


def test_a_state_of_another_object_costs_a_warning_and_is_refused_when_strict(tmp_path):
    trained = fresh()
    with watch_heads(trained.model, trained.optimizer, log_dir=tmp_path, **QUIET) as heads:
        with pytest.warns(MonitoringWarning, match=r"no state of `watch_heads`, it has \['model'\]"):
            heads.load_state_dict({"model": 1})
        train(heads, trained, steps=1)
        with pytest.raises(MisconfigurationError, match="between steps"), heads.step():
            heads.load_state_dict(heads.state_dict())
    strict = fresh()
    with watch_heads(strict.model, strict.optimizer, history=False, strict=True, **QUIET) as heads, pytest.raises(
        MisconfigurationError, match=r"no state of `watch_heads`, it has \['model'\]"
    ):  # fmt: skip
        heads.load_state_dict({"model": 1})


def test_a_checkpoint_of_another_model_starts_a_new_history(tmp_path):
    trained = fresh()
    with watch_heads(trained.model, trained.optimizer, log_dir=tmp_path, **QUIET) as heads:
        train(heads, trained, steps=2)
    state = copy.deepcopy(heads.state_dict())
    torch.manual_seed(0)
    other = Classifier(num_heads=2)
    optimizer = adam(other)
    options = {"log_dir": tmp_path, **QUIET}
    strict = watch_heads(other, optimizer, strict=True, **options)
    with pytest.raises(MisconfigurationError, match="or with other heads"):
        strict.load_state_dict(state)
    strict.close()
    with watch_heads(other, optimizer, **options) as again:
        with pytest.warns(MonitoringWarning, match="or with other heads"):
            again.load_state_dict(state)
        train(again, Trained(other, optimizer), start=2, steps=4)
    assert again.history_path != heads.history_path
    assert readings(again.history_path) == [2, 4]


def test_the_optimizer_is_found_inside_wrappers_of_other_libraries(tmp_path):
    trained = fresh()
    wrapped = SimpleNamespace(optimizer=SimpleNamespace(optimizer=trained.optimizer))
    with watch_heads(trained.model, wrapped, log_dir=tmp_path, **QUIET) as heads:
        train(heads, trained, steps=2)
    assert heads.global_step == 2
