"""Half precision and activation checkpointing: what is measured, and how often a forward is captured."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from hdi_callback import HeadDiversityMonitor, head_covariance, head_diversity
from tests.models import HEADS, LAYERS, LENGTH, Block, Classifier

METRICS = ["hdi", "hdi_worst_pair", "head_covariance", "head_correlation"]


def tokens(batch: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randint(16, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))


def classifier(kind: type[Classifier] = Classifier, **options) -> Classifier:
    torch.manual_seed(0)
    return kind(**options)


def keep_inputs_of_projections(model: Classifier) -> dict[str, list[torch.Tensor]]:
    """By hooks of the test's own; every forward is kept, recomputations included."""
    kept: dict[str, list[torch.Tensor]] = {name: [] for name in LAYERS}
    for name, block in zip(LAYERS, [module for module in model.modules() if isinstance(module, Block)], strict=True):
        block.attn.out_proj.register_forward_pre_hook(
            lambda _, args, name=name: kept[name].append(args[0].detach().clone())
        )
    return kept


def check_against_float64(record, model: Classifier, recorded: dict[str, torch.Tensor]) -> None:
    """The values of a record are those of the stored weights and of the outputs as they came, computed in float64."""
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for name, block in zip(LAYERS, blocks, strict=True):
        values = record.layers[name].values
        key = block.attn.k_proj.weight.detach().double().unflatten(0, (HEADS, -1))
        assert values["hdi"] == pytest.approx(float(head_diversity(key, method="exact").index), abs=1e-7)
        output = block.attn.out_proj.weight.detach().double().T.unflatten(0, (HEADS, -1))
        outputs = recorded[name].double().flatten(0, 1).unflatten(-1, (HEADS, -1))
        truth = head_covariance(outputs, output)
        assert values["head_covariance"] == pytest.approx(float(truth.covariance), rel=1e-4, abs=1e-9)
        assert values["head_correlation"] == pytest.approx(float(truth.correlation), abs=1e-5)


def test_under_autocast_outputs_are_taken_in_bfloat16_and_measured_in_float32():
    model = classifier()
    kept = keep_inputs_of_projections(model)
    with HeadDiversityMonitor(model, metrics=METRICS) as monitor:
        monitor.arm()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(tokens()).float().sum().backward()
            record = monitor.measure(0).record()  # as a plain loop may do, still under autocast
    assert {outputs[0].dtype for outputs in kept.values()} == {torch.bfloat16}
    check_against_float64(record, model, {name: outputs[0] for name, outputs in kept.items()})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_and_outputs_of_any_width_are_measured_in_float32_or_wider(dtype):
    model = classifier().to(dtype)
    kept = keep_inputs_of_projections(model)
    with HeadDiversityMonitor(model, metrics=METRICS) as monitor:
        monitor.arm()
        model(tokens()).sum().backward()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        reading = monitor.measure(0)
        assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))
    check_against_float64(reading.record(), model, {name: outputs[0] for name, outputs in kept.items()})


def test_outputs_near_the_end_of_float16_do_not_overflow():
    model = classifier().half()
    kept = keep_inputs_of_projections(model)
    with HeadDiversityMonitor(model, metrics=METRICS) as monitor:
        monitor.arm()
        for block in model.blocks:  # squares of these are far beyond float16
            block.attn.out_proj(3e4 * torch.randn(2, 6, 32).clamp(-2, 2).half())
        record = monitor.measure(0).record()
    assert record.layers[LAYERS[0]].values["head_covariance"] != 0
    check_against_float64(record, model, {name: outputs[0] for name, outputs in kept.items()})


# --- activation checkpointing


class Recomputed(Classifier):
    reentrant = False

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x.mean(1))


class RecomputedReentrant(Recomputed):
    reentrant = True


def wrapped(kind: CheckpointImpl) -> Classifier:
    model = classifier(dropout=0.5)
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=lambda module: checkpoint_wrapper(module, checkpoint_impl=kind),
        check_fn=lambda module: isinstance(module, Block),
    )
    return model


CHECKPOINTED = {
    "function": lambda: classifier(Recomputed, dropout=0.5),
    "reentrant function": lambda: classifier(RecomputedReentrant, dropout=0.5),
    "wrapper": lambda: wrapped(CheckpointImpl.NO_REENTRANT),
    "reentrant wrapper": lambda: wrapped(CheckpointImpl.REENTRANT),
}


@pytest.mark.parametrize("make", CHECKPOINTED)
def test_a_forward_that_runs_twice_is_captured_once(make):
    model = CHECKPOINTED[make]()
    kept = keep_inputs_of_projections(model)
    x = model.embed(tokens()).detach().requires_grad_()  # reentrant checkpoints want a gradient to come in
    model.embed = nn.Identity()
    with HeadDiversityMonitor(model, metrics=METRICS) as monitor:
        assert [layer.name for layer in monitor.layers] == LAYERS, "the user's names, without those of wrappers"
        monitor.arm()
        loss = model(x).sum()
        between = {name: tap.captured(True).outputs for name, tap in monitor._taps._taps.items()}
        loss.backward()
        after = {name: tap.captured(True).outputs for name, tap in monitor._taps._taps.items()}
        record = monitor.measure(0).record()
    assert {len(outputs) for outputs in kept.values()} == {2}, "the forward ran again inside backward"
    # Where the forward ran without autograd, what is repeated within the backward takes its place.
    assert all(torch.equal(after[name], between[name]) for name in LAYERS)
    check_against_float64(record, model, {name: outputs[0] for name, outputs in kept.items()})


def test_the_switch_of_transformers_is_captured_once():
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).train()
    model.gradient_checkpointing_enable()
    forwards = []
    model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(lambda _, args: forwards.append(args[0].detach()))
    with HeadDiversityMonitor(model, metrics=METRICS) as monitor:
        for step in range(2):
            forwards.clear()
            monitor.arm()
            model(tokens(), labels=tokens()).loss.backward()
            assert len(forwards) == 2, "the forward ran again inside backward"
            (captured,) = (
                tap.captured(True).outputs
                for name, tap in monitor._taps._taps.items()
                if name == "model.layers.1.self_attn"
            )
            assert torch.equal(captured.flatten(1), forwards[0].flatten(0, 1))
            assert captured.data_ptr() != forwards[0].data_ptr()
            record = monitor.measure(step).record()
            assert len([tag for tag in record.scalars(METRICS) if tag.startswith("head_correlation")]) == 2
