"""Ways of training under Lightning: what the readings hold, against what the projections really received."""

from __future__ import annotations

import copy

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import LambdaCallback, StochasticWeightAveraging
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hdi_callback import HDICallback
from hdi_callback.monitoring.history import read_records
from tests.models import LAYERS, LIT_LAYERS, Block, Classifier, batches
from tests.regimes.trainings import Module, Witness, reported, trainer_for


def check_readings(callback: HDICallback, witness: Witness, steps: list[int], *, names=LIT_LAYERS, abs_tol=1e-6):
    """Every reading but the last holds the weights and outputs of its step; the last the weights alone."""
    records = read_records(callback.history_path)
    assert [record.step for record in records] == steps
    for record in records:
        for place, name in enumerate(names):
            values = record.layers[name].values
            assert values["hdi"] == pytest.approx(witness.hdi(record.step, place), abs=abs_tol)
            if record is records[-1]:
                assert "head_covariance" not in values
            else:
                truth = witness.covariance(record.step, place)
                assert values["head_covariance"] == pytest.approx(truth, rel=1e-3, abs=1e-8)
    assert len({record.layers[names[0]].values["hdi"] for record in records}) == len(records), "the weights moved"


# --- torch.compile


def within(lit: Module, backend: str):
    lit.net = torch.compile(lit.net, backend=backend)
    return lit


def within_in_place(lit: Module, backend: str):
    lit.net.compile(backend=backend)
    return lit


def whole(lit: Module, backend: str):
    return torch.compile(lit, backend=backend)


def whole_in_place(lit: Module, backend: str):
    """Without effect on training, as Lightning calls `training_step`, and not the module."""
    lit.compile(backend=backend)
    return lit


class CompiledWhenConfigured(Module):
    def configure_model(self):
        if not hasattr(self.net, "_orig_mod"):
            self.net = torch.compile(self.net, backend="eager")


def when_configured(lit: Module, backend: str):
    return CompiledWhenConfigured(lit.net)


def curves(folder, model, **options) -> dict[int, dict[str, float]]:
    callback = HDICallback(every_n_steps=2)
    trainer = trainer_for(folder, callback, num_sanity_val_steps=2, val_check_interval=3, **options)
    trainer.fit(model, batches(count=7), batches(count=2))
    return {record.step: record.scalars(["hdi", "head_covariance"]) for record in read_records(callback.history_path)}


WAYS = [(within, "aot_eager"), (within_in_place, "eager"), (whole, "eager"), (when_configured, "eager")]


@pytest.mark.some_slow(quick=0)
@pytest.mark.parametrize(("way", "backend"), [*WAYS, (whole_in_place, "eager")])
def test_a_compiled_training_reads_as_the_eager_one(tmp_path, dynamo, way, backend):
    """With a sanity check and evaluations in between, for which the hooks are taken off."""
    eager = curves(tmp_path / "eager", Module())
    assert {f"head_covariance/{name}" for name in LIT_LAYERS} < set(eager[0])
    assert dynamo["stats"]["unique_graphs"] == 0
    compiled = curves(tmp_path / "compiled", way(Module(), backend))
    assert list(compiled) == [0, 2, 4, 6, 7]
    for step, tags in eager.items():
        assert compiled[step] == pytest.approx(tags, abs=1e-5)
    assert not dynamo["graph_break"]
    graphs = dynamo["stats"]["unique_graphs"]
    assert graphs == 0 if way is whole_in_place else graphs == 3, "of evaluation, of training, and of an armed step"


def test_a_second_fit_of_a_compiled_module_is_read_too(tmp_path, dynamo):
    callback, lit = HDICallback(every_n_steps=2), within(Module(), "eager")
    trainer = trainer_for(tmp_path, callback)
    trainer.fit(lit, batches(count=3))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(lit, batches(count=3))
    records = {record.step: record.scalars(["head_covariance"]) for record in read_records(callback.history_path)}
    assert {step: len(tags) for step, tags in records.items()} == {0: 2, 2: 2, 3: 0, 4: 2, 6: 0}


@pytest.mark.parametrize("resets", [False, True])
def test_a_module_that_was_compiled_and_called_before_is_reported_once_with_a_remedy_that_helps(
    tmp_path, dynamo, resets
):
    lit = within(Module(), "eager")
    # Lightning takes the callbacks out while it looks for a learning rate.
    lit.learning_rate = 0.01
    callback = HDICallback(every_n_steps=2)
    trainer = trainer_for(tmp_path, callback)
    with reported() as warnings:
        Tuner(trainer).lr_find(lit, batches(count=7), num_training=6, update_attr=False)
        if resets:
            torch.compiler.reset()
        trainer.fit(lit, batches(count=7))
    assert [record.step for record in read_records(callback.history_path)] == [0, 2, 4, 6, 7]
    tags = read_records(callback.history_path)[1].scalars(["hdi", "head_covariance"])
    assert {f"hdi/{name}" for name in LIT_LAYERS} < set(tags)
    assert (f"head_covariance/{LIT_LAYERS[0]}" in tags) is resets
    assert len(warnings) == (0 if resets else 1)
    assert resets or "torch.compiler.reset()" in warnings[0]


def test_a_module_that_only_evaluated_before_is_read(tmp_path, dynamo):
    lit = within(Module(), "eager")
    trainer_for(tmp_path).validate(lit, batches(count=2), verbose=False)
    found = curves(tmp_path, lit)
    assert list(found) == [0, 2, 4, 6, 7]
    assert all(len(tags) > 3 for step, tags in found.items() if step < 7)


# --- precision


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed", "16-true", "64-true"])
def test_in_every_precision_readings_use_the_stored_weights_and_the_computed_outputs(tmp_path, precision):
    """Without a GPU Lightning trains in bf16-mixed when it is asked for 16-mixed, and says so."""
    witness, callback = Witness(), HDICallback(every_n_steps=2)
    trainer = trainer_for(tmp_path, witness, callback, precision=precision)
    trainer.fit(Module(), batches(count=5))
    kinds = {"16-true": torch.float16, "64-true": torch.float64}
    assert {outputs[0].dtype for outputs in witness.inputs[2]} == {kinds.get(precision, torch.bfloat16)}
    check_readings(callback, witness, [0, 2, 4, 5], abs_tol=1e-5)


# --- gradients


@pytest.mark.parametrize(
    "clip", [{"gradient_clip_val": 0.1}, {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}]
)
def test_accumulated_and_clipped_gradients(tmp_path, clip):
    """A reading has the head outputs of the first of the batches that make a step."""
    witness, callback = Witness(), HDICallback(every_n_steps=2)
    trainer = trainer_for(tmp_path, witness, callback, accumulate_grad_batches=3, **clip)
    trainer.fit(Module(), batches(count=14))
    assert trainer.global_step == 5
    check_readings(callback, witness, [0, 2, 4, 5])


class TwoInTurn(L.LightningModule):
    """Two networks, each with an optimizer, trained one after the other on each batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.a, self.b = Classifier(blocks=1), Classifier(blocks=1)

    def training_step(self, batch, batch_idx):
        tokens, label = batch
        for optimizer, net in zip(self.optimizers(), (self.a, self.b)):
            optimizer.zero_grad()
            # The second is trained on what the first says.
            said = 0 if net is self.a else self.a(tokens).detach()
            self.manual_backward(F.cross_entropy(net(tokens) + said, label))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.a, self.b)]


def test_networks_trained_alternately_are_all_read_with_their_outputs(tmp_path):
    """Manual optimization; the second network's forward comes after the first has stepped."""
    witness, callback = Witness(), HDICallback(every_n_steps=4)
    trainer_for(tmp_path, witness, callback).fit(TwoInTurn(), batches(count=6))
    check_readings(callback, witness, [0, 4, 8, 12], names=["a.blocks.0.attn", "b.blocks.0.attn"])
    assert all(len(outputs[0]) == 2 for outputs in witness.inputs.values()), "the first runs twice in a batch"


class UnusedInTurn(TwoInTurn):
    def training_step(self, batch, batch_idx):
        tokens, label = batch
        optimizer = self.optimizers()[0]
        self.manual_backward(F.cross_entropy(self.a(tokens), label))
        optimizer.step()


def test_a_network_that_did_not_run_is_reported_once(tmp_path):
    callback = HDICallback(every_n_steps=2)
    with reported() as warnings:
        trainer_for(tmp_path, callback).fit(UnusedInTurn(), batches(count=6))
    assert len(warnings) == 1
    assert "No head outputs of `b.blocks.0.attn`" in warnings[0]
    records = read_records(callback.history_path)
    assert [record.step for record in records] == [0, 2, 4, 6]
    assert [len(record.scalars(["head_covariance"])) for record in records] == [1, 1, 1, 0]
    assert all(len(record.scalars(["hdi"])) == 4 for record in records)


# --- averaged weights


class OwnAverage(L.Callback):
    """As many write it: a copy of the module, swapped in for evaluation and left in the model at the end."""

    def on_train_start(self, trainer, module):
        self.average = copy.deepcopy(module.net)

    def on_train_batch_end(self, trainer, module, *args):
        for mean, parameter in zip(self.average.parameters(), module.net.parameters()):
            mean.data.lerp_(parameter.data, 0.1)

    def swap(self, module):
        for mean, parameter in zip(self.average.parameters(), module.net.parameters()):
            parameter.data, mean.data = mean.data, parameter.data

    def on_validation_start(self, trainer, module):
        if hasattr(self, "average"):
            self.swap(module)

    def on_validation_end(self, trainer, module):
        if hasattr(self, "average"):
            self.swap(module)

    def on_train_end(self, trainer, module):
        self.swap(module)


def swa() -> L.Callback:
    return StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)


def rounding() -> L.Callback:
    """No average, but weights that change at the end all the same, by a function."""
    return LambdaCallback(on_train_end=lambda _, module: [item.data.round_(decimals=1) for item in module.parameters()])


AVERAGES = {"own": OwnAverage, "rounding": rounding, "StochasticWeightAveraging": swa}
if hasattr(lightning_callbacks, "EMAWeightAveraging"):  # since 2.6
    AVERAGES["EMAWeightAveraging"] = lambda: lightning_callbacks.EMAWeightAveraging(decay=0.9)


class WithBatchNorm(Module):
    """For its sake Lightning's stochastic averaging adds an epoch in which nothing is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(self.net, nn.BatchNorm1d(5))


@pytest.mark.some_slow(quick=4)
@pytest.mark.parametrize("comes_first", [True, False])
@pytest.mark.parametrize(
    ("average", "kind"), [*((name, Module) for name in AVERAGES), ("StochasticWeightAveraging", WithBatchNorm)]
)
def test_readings_use_the_trained_weights_and_not_their_average(tmp_path, average, kind, comes_first):
    def fit(folder, *watching):
        averaging, lit = AVERAGES[average](), kind()
        callbacks = [*watching, averaging] if comes_first else [averaging, *watching]
        trainer = trainer_for(folder, witness, *callbacks, max_epochs=3, val_check_interval=2)
        trainer.fit(lit, batches(count=4), batches(count=1))
        return lit

    witness = Witness()
    alone = fit(tmp_path / "alone").state_dict().values()
    witness, callback = Witness(), HDICallback(every_n_steps=4 if kind is WithBatchNorm else 5)
    watched = fit(tmp_path / "watched", callback)
    assert all(torch.equal(one, other) for one, other in zip(alone, watched.state_dict().values(), strict=True))
    if kind is WithBatchNorm:
        check_readings(callback, witness, [0, 4, 8, 12], names=[f"net.0.{name}" for name in LAYERS])
        left = watched.net[0].blocks[0].attn.k_proj.weight
    else:
        check_readings(callback, witness, [0, 5, 10, 12])
        left = watched.net.blocks[0].attn.k_proj.weight
    assert not torch.equal(left.double(), witness.weights[12][0][0]), "an average is left in the model"


# --- activation checkpointing


class Recomputed(Classifier):
    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x.mean(1))


class WrappedWhenConfigured(Module):
    def configure_model(self):
        apply_activation_checkpointing(self.net, check_fn=lambda module: isinstance(module, Block))


@pytest.mark.parametrize("make", [lambda: Module(Recomputed(dropout=0.3)), lambda: WrappedWhenConfigured(dropout=0.3)])
def test_under_activation_checkpointing_the_first_forward_of_a_step_is_captured(tmp_path, make):
    witness, callback = Witness(), HDICallback(every_n_steps=2)
    trainer_for(tmp_path, witness, callback).fit(make(), batches(count=5))
    assert {len(outputs) for outputs in witness.inputs[2]} == {2}, "the forward ran again inside backward"
    check_readings(callback, witness, [0, 2, 4, 5])
