"""The callback inside a real trainer: when it reads, where the numbers go, and what it leaves behind."""

from __future__ import annotations

import json
import math
import warnings

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from torch import nn

from hdi_callback import HDICallback, load_history
from hdi_callback.core import head_diversity
from hdi_callback.errors import HeadCollapseWarning, MisconfigurationError, MonitoringWarning
from hdi_callback.monitoring.history import read_history, read_lines, read_records
from hdi_callback.rules import MeanAlignment
from tests.curves import OF_OUTPUTS, OF_WEIGHTS
from tests.models import LIT_LAYERS, Classifier, LitClassifier, batches
from tests.trainers import trainer_for

DEFAULTS = OF_WEIGHTS + OF_OUTPUTS
OVER_LAYERS = {"hdi/mean", "hdi/min", "hdi_alignment/max", "hdi_energy_alignment/max"}

OF_RESULTS = {"attention_heads/worst_alignment", "attention_heads/alerts"}


def hook_count(model: nn.Module) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
        for module in model.modules()
    )


class Remember(Logger):
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int, dict[str, float]]] = []

    name = "remember"
    version = "0"

    def log_hyperparams(self, *args, **kwargs) -> None: ...

    def log_metrics(self, metrics, step=None) -> None:
        self.logged.append((step, dict(metrics)))

    def readings(self) -> dict[int, dict[str, float]]:
        return {step: metrics for step, metrics in self.logged if any(tag.startswith("hdi") for tag in metrics)}


def test_readings_fall_on_step_zero_every_n_steps_and_the_end(tmp_path):
    callback, logger = HDICallback(every_n_steps=5), Remember()
    trainer_for(tmp_path, callback, logger=logger).fit(LitClassifier(), batches(count=13))
    assert list(logger.readings()) == [0, 5, 10, 13]


def test_readings_are_not_thinned_by_log_every_n_steps(tmp_path):
    logger = Remember()
    trainer_for(tmp_path, HDICallback(every_n_steps=2), logger=logger, log_every_n_steps=1000).fit(
        LitClassifier(), batches(count=6)
    )
    assert list(logger.readings()) == [0, 2, 4, 6]


def test_gradient_accumulation_reads_each_optimizer_step_once(tmp_path):
    logger = Remember()
    trainer = trainer_for(tmp_path, HDICallback(every_n_steps=2), logger=logger, accumulate_grad_batches=3)
    trainer.fit(LitClassifier(), batches(count=18))
    assert trainer.global_step == 6
    steps = [step for step, _ in logger.logged]
    assert steps == sorted(set(steps)) == [0, 2, 4, 6]


def test_every_tag_of_every_layer_is_logged_at_every_reading(tmp_path):
    logger = Remember()
    trainer_for(tmp_path, HDICallback(every_n_steps=4), logger=logger).fit(LitClassifier(), batches(count=8))
    weights = {f"{metric}/{name}" for metric in OF_WEIGHTS for name in LIT_LAYERS} | OVER_LAYERS
    outputs = {f"{metric}/{name}" for metric in OF_OUTPUTS for name in LIT_LAYERS} | {"head_output_overlap/max"}
    readings = logger.readings()
    weights |= OF_RESULTS
    assert set(readings[0]) == set(readings[4]) == weights | outputs
    assert set(readings[8]) == weights, "no forward follows the last step, so nothing is said of head outputs"


def test_a_reading_at_step_s_has_the_weights_after_s_optimizer_steps(tmp_path):
    logger = Remember()

    class Keep(L.Callback):
        def __init__(self):
            self.weights = {}

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            self.weights[trainer.global_step] = module.net.blocks[0].attn.k_proj.weight.detach().clone()

    keep = Keep()
    trainer_for(tmp_path, keep, HDICallback(every_n_steps=3), logger=logger).fit(
        LitClassifier(learning_rate=0.1), batches(count=7)
    )
    for step in (0, 3, 6):
        weight = keep.weights[step].unflatten(0, (4, 8))
        assert logger.readings()[step][f"hdi/{LIT_LAYERS[0]}"] == pytest.approx(
            float(head_diversity(weight.double(), method="exact").index), abs=1e-6
        )
    assert len({readings["hdi/mean"] for readings in logger.readings().values()}) == 4, "the weights moved in between"


def test_callback_metrics_hold_the_latest_reading(tmp_path):
    trainer = trainer_for(tmp_path, HDICallback(every_n_steps=4), logger=(logger := Remember()))
    trainer.fit(LitClassifier(), batches(count=6), batches(count=2))
    assert {"hdi/mean", "hdi/min", *(f"hdi/{name}" for name in LIT_LAYERS)} <= set(trainer.callback_metrics)
    assert float(trainer.callback_metrics["hdi/min"]) == pytest.approx(logger.readings()[6]["hdi/min"])


@pytest.mark.parametrize("validate", [False, True])
def test_early_stopping_can_monitor_hdi(tmp_path, validate):
    stop = EarlyStopping(monitor="hdi/min", mode="max", stopping_threshold=0.1, patience=1000)
    trainer = trainer_for(tmp_path, HDICallback(every_n_steps=2), stop, max_epochs=5)
    trainer.fit(LitClassifier(), batches(count=4), batches(count=1) if validate else None)
    assert trainer.current_epoch == 1, "chance is far above the threshold, so it stops after the first epoch"
    assert stop.stopped_epoch == 0
    assert 0.1 < float(trainer.callback_metrics["hdi/min"]) < 1


def test_model_checkpoint_can_monitor_hdi(tmp_path):
    keep = ModelCheckpoint(
        dirpath=tmp_path / "kept", monitor="hdi/min", mode="max", every_n_train_steps=2, save_top_k=2
    )
    trainer_for(tmp_path, HDICallback(every_n_steps=2), keep, enable_checkpointing=True).fit(
        LitClassifier(), batches(count=8)
    )
    assert len(keep.best_k_models) == 2
    assert all(0 < float(score) < 1 for score in keep.best_k_models.values())


def test_the_progress_bar_shows_hdi_when_asked(tmp_path):
    for asked in (False, True):
        trainer = trainer_for(tmp_path, HDICallback(every_n_steps=2, prog_bar=asked))
        trainer.fit(LitClassifier(), batches(count=4))
        assert ("hdi/min" in trainer.progress_bar_metrics) is asked


def test_the_history_holds_what_the_loggers_got(tmp_path):
    callback, logger = HDICallback(every_n_steps=3), Remember()
    trainer_for(tmp_path, callback, logger=logger).fit(LitClassifier(), batches(count=8))
    records = {record.step: record for record in read_records(callback.history_path)}
    assert set(records) == set(logger.readings())
    for step, metrics in logger.readings().items():
        assert records[step].scalars(DEFAULTS) == pytest.approx(
            {tag: value for tag, value in metrics.items() if tag not in OF_RESULTS}, rel=1e-8
        )
        worst = max(layer.values["hdi_worst_alignment"] for layer in records[step].layers.values())
        assert metrics["attention_heads/worst_alignment"] == pytest.approx(worst, rel=1e-8)
        assert metrics["attention_heads/alerts"] == 0


def test_the_history_is_readable_while_training_goes_on(tmp_path):
    callback = HDICallback(every_n_steps=2)
    logged = []

    class Peek(L.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            logged.append(list(load_history(callback.history_path)["step"].unique()))

    trainer_for(tmp_path, callback, Peek()).fit(LitClassifier(), batches(count=4))
    assert logged == [[0], [0], [0, 2], [0, 2]]


def test_the_history_is_in_the_log_directory_of_the_run(tmp_path):
    for version in range(2):
        callback = HDICallback(every_n_steps=2)
        trainer_for(tmp_path, callback, logger=CSVLogger(tmp_path)).fit(LitClassifier(), batches(count=2))
        expected = tmp_path / "lightning_logs" / f"version_{version}" / "hdi" / "history.jsonl"
        assert callback.history_path == expected
        assert expected.is_file()


def test_runs_that_share_a_log_directory_keep_a_history_each(tmp_path):
    paths = []
    for _ in range(2):
        callback = HDICallback(every_n_steps=2)
        trainer_for(tmp_path, callback).fit(LitClassifier(), batches(count=2))
        paths.append(callback.history_path)
    assert len(set(paths)) == 2
    assert [list(load_history(path)["step"].unique()) for path in paths] == [[0, 2], [0, 2]]


def test_a_custom_history_path_is_used_and_history_false_writes_none(tmp_path):
    own = HDICallback(every_n_steps=2, history=str(tmp_path / "mine" / "heads.jsonl"))
    trainer_for(tmp_path, own).fit(LitClassifier(), batches(count=2))
    assert own.history_path == tmp_path / "mine" / "heads.jsonl"
    assert own.history_path.is_file()
    none = HDICallback(every_n_steps=2, history=False)
    trainer_for(tmp_path / "none", none).fit(LitClassifier(), batches(count=2))
    assert none.history_path is None
    assert list(tmp_path.glob("none/**/*.jsonl")) == []


def test_the_history_names_the_layers_of_the_run(tmp_path):
    callback = HDICallback(every_n_steps=2)
    trainer_for(tmp_path, callback).fit(LitClassifier(), batches(count=2))
    run = next(read_lines(callback.history_path))
    assert run["kind"] == "run"
    assert [layer["name"] for layer in run["layers"]] == LIT_LAYERS
    assert {layer["num_heads"] for layer in run["layers"]} == {4}
    assert {layer["head_dim"] for layer in run["layers"]} == {8}


class Adversaries(L.LightningModule):
    """Two optimizers, stepped by hand; Lightning counts two steps a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.a, self.b = Classifier(blocks=1), Classifier(blocks=1)

    def training_step(self, batch, batch_idx):
        tokens, label = batch
        for optimizer, net in zip(self.optimizers(), (self.a, self.b)):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(tokens), label)
            self.manual_backward(loss)
            optimizer.step()
        self.log("train_loss", loss)

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.a, self.b)]


def test_several_optimizers_count_as_lightning_counts(tmp_path):
    callback, logger = HDICallback(every_n_steps=4), Remember()
    trainer = trainer_for(tmp_path, callback, logger=logger, log_every_n_steps=1)
    trainer.fit(Adversaries(), batches(count=6))
    assert trainer.global_step == 12
    assert [record.step for record in read_records(callback.history_path)] == [0, 4, 8, 12]
    # On the axis of the trainer's own curves a batch is one step, so that the curves line up with the loss.
    assert list(logger.readings()) == [0, 2, 4, 6]
    losses = [step for step, metrics in logger.logged if "train_loss" in metrics]
    assert set(logger.readings()) - {6} <= set(losses)


class ManualWithoutTrainer(Adversaries):
    """Backward and step behind Lightning's back: no hook runs and nothing is counted."""

    def training_step(self, batch, batch_idx):
        tokens, label = batch
        for net in (self.a, self.b):
            nn.functional.cross_entropy(net(tokens), label).backward()


def test_a_batch_without_a_backward_by_the_trainer_is_read(tmp_path):
    callback = HDICallback(every_n_steps=4)
    trainer_for(tmp_path, callback).fit(ManualWithoutTrainer(), batches(count=3))
    assert [record.step for record in read_records(callback.history_path)] == [0]


def test_fast_dev_run_passes_and_leaves_nothing_on_the_disk(tmp_path):
    callback = HDICallback(every_n_steps=1)
    trainer = trainer_for(tmp_path, callback, fast_dev_run=2, logger=TensorBoardLogger(tmp_path))
    trainer.fit(LitClassifier(), batches(count=4), batches(count=2))
    assert "hdi/min" in trainer.callback_metrics
    assert list(tmp_path.rglob("*.jsonl")) == []


class SkipsAfter(LitClassifier):
    """Skips the rest of each epoch from a batch on, before its forward."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place

    def on_train_batch_start(self, batch, place):
        return -1 if place == self.place else None


@pytest.mark.parametrize(("place", "steps"), [(0, [0]), (4, [0, 2, 4, 6, 8]), (3, [0, 2, 4, 6])])
def test_a_batch_that_the_module_skips_raises_no_warning(tmp_path, place, steps):
    callback = HDICallback(every_n_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MonitoringWarning)
        trainer_for(tmp_path, callback, max_epochs=2).fit(SkipsAfter(place), batches(count=6))
    records = read_records(callback.history_path)
    assert [record.step for record in records] == steps
    with_outputs = [record.step for record in records if "head_covariance" in record.layers[LIT_LAYERS[0]].values]
    assert with_outputs == steps[:-1], "the weights alone at the end, as after any training"


def test_evaluation_passes_are_not_captured(tmp_path):
    """The sanity check and the validation loop run in between, and nothing of theirs is in the readings."""
    histories = []
    for validate in (False, True):
        L.seed_everything(1)
        callback = HDICallback(every_n_steps=2)
        trainer = trainer_for(
            tmp_path / str(validate), callback, max_epochs=2, val_check_interval=2 if validate else None,
            num_sanity_val_steps=2,
        )  # fmt: skip
        trainer.fit(LitClassifier(), batches(count=4), batches(count=3, size=2) if validate else None)
        histories.append(load_history(callback.history_path).drop(columns="time"))
    assert histories[0].equals(histories[1])


def test_validating_and_testing_alone_do_nothing(tmp_path):
    callback, model = HDICallback(every_n_steps=1), LitClassifier()
    trainer_for(tmp_path, callback).validate(model, batches(count=2), verbose=False)
    assert callback.history_path is None
    assert hook_count(model) == 0


def test_a_second_fit_of_the_same_trainer_continues_where_the_first_ended(tmp_path):
    callback, model = HDICallback(every_n_steps=4), LitClassifier()
    trainer = trainer_for(tmp_path, callback)
    trainer.fit(model, batches(count=6))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, batches(count=6))
    assert trainer.global_step == 12
    steps = [line["step"] for line in read_lines(callback.history_path) if line["kind"] == "reading"]
    assert steps == [0, 4, 6, 8, 12]
    assert hook_count(model) == 0


def test_a_fit_of_another_trainer_starts_a_new_run(tmp_path):
    callback, model = HDICallback(every_n_steps=4), LitClassifier()
    paths = []
    for run in ("first", "second"):
        trainer_for(tmp_path / run, callback).fit(model, batches(count=5))
        paths.append(callback.history_path)
    assert paths[0] != paths[1]
    for path in paths:
        assert [record.step for record in read_records(path)] == [0, 4, 5]


def test_a_resumed_run_continues_its_history_without_a_gap_or_a_double_point(tmp_path):
    callback = HDICallback(every_n_steps=2)
    trainer = trainer_for(tmp_path, callback)
    trainer.fit(LitClassifier(), batches(count=5))
    trainer.save_checkpoint(tmp_path / "at_five.ckpt")
    resumed = HDICallback(every_n_steps=2)
    trainer = trainer_for(tmp_path, resumed, max_epochs=2)
    trainer.fit(LitClassifier(), batches(count=5), ckpt_path=tmp_path / "at_five.ckpt")
    assert resumed.history_path == callback.history_path
    steps = [line["step"] for line in read_lines(resumed.history_path) if line["kind"] == "reading"]
    assert steps == [0, 2, 4, 5, 6, 8, 10]


def test_two_callbacks_with_different_names_share_a_trainer(tmp_path):
    first = HDICallback(every_n_steps=2, name="first", include=[LIT_LAYERS[0]])
    second = HDICallback(every_n_steps=3, name="second", include=[LIT_LAYERS[1]])
    logger = Remember()
    trainer = trainer_for(tmp_path, first, second, logger=logger)
    trainer.fit(LitClassifier(), batches(count=6))
    tags = {tag for _, metrics in logger.logged for tag in metrics}
    assert f"first/hdi/{LIT_LAYERS[0]}" in tags
    assert f"second/hdi/{LIT_LAYERS[1]}" in tags
    assert f"second/hdi/{LIT_LAYERS[0]}" not in tags
    assert first.history_path != second.history_path
    assert [record.step for record in read_records(first.history_path)] == [0, 2, 4, 6]
    assert [record.step for record in read_records(second.history_path)] == [0, 3, 6]


def test_two_callbacks_without_names_are_refused_before_training(tmp_path):
    callbacks = HDICallback(include=[LIT_LAYERS[0]]), HDICallback(include=[LIT_LAYERS[1]])
    with pytest.raises(MisconfigurationError, match=r'write HDICallback\(name="encoder"'):
        trainer_for(tmp_path, *callbacks).fit(LitClassifier(), batches(count=2))


class Breaks(LitClassifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 4:
            raise RuntimeError("the user's own mistake")
        return loss


def test_an_exception_in_training_leaves_no_hook_and_keeps_what_was_measured(tmp_path):
    callback, model = HDICallback(every_n_steps=2), Breaks()
    with pytest.raises(RuntimeError, match="the user's own mistake"):
        trainer_for(tmp_path, callback).fit(model, batches(count=8))
    assert hook_count(model) == 0
    assert [record.step for record in read_records(callback.history_path)] == [0, 2]


def test_hooks_are_installed_only_on_steps_that_are_read(tmp_path):
    counts = []

    class Count(L.Callback):
        def on_before_backward(self, trainer, module, loss):
            counts.append(hook_count(module))

    model = LitClassifier()
    trainer_for(tmp_path, HDICallback(every_n_steps=2), Count()).fit(model, batches(count=4))
    assert [count > 0 for count in counts] == [True, False, True, False]
    assert hook_count(model) == 0


def final_state(tmp_path, *callbacks) -> tuple[list[float], dict[str, torch.Tensor], torch.Tensor, dict]:
    L.seed_everything(3)
    model = LitClassifier(dropout=0.3)
    trainer = trainer_for(tmp_path, *callbacks, max_epochs=2, gradient_clip_val=0.5)
    trainer.fit(model, batches(count=8), batches(count=2))
    return model.losses, model.state_dict(), torch.get_rng_state(), trainer.optimizers[0].state_dict()["state"]


def test_losses_weights_optimizer_and_random_state_are_bit_identical_with_and_without_the_callback(tmp_path):
    everything = ["hdi_query", "hdi_value", "hdi_output", "head_correlation_error", "hdi"]
    off = final_state(tmp_path / "off")
    on = final_state(tmp_path / "on", HDICallback(every_n_steps=1, metrics=everything))
    assert off[0] == on[0]
    assert off[1].keys() == on[1].keys()
    assert all(torch.equal(off[1][name], on[1][name]) for name in off[1])
    assert torch.equal(off[2], on[2])
    assert all(torch.equal(off[3][i][key], on[3][i][key]) for i in off[3] for key in off[3][i])


def test_metrics_are_chosen_by_name(tmp_path):
    logger = Remember()
    trainer_for(tmp_path, HDICallback(every_n_steps=2, metrics=["hdi_query", "hdi_alignment"]), logger=logger).fit(
        LitClassifier(), batches(count=2)
    )
    tags = {f"{m}/{n}" for m in ("hdi_query", "hdi_alignment") for n in LIT_LAYERS}
    assert set(logger.readings()[0]) == tags | {"hdi_alignment/max"} | OF_RESULTS


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"every_n_steps": 0}, "write 50"),
        ({"metrics": ["hdi", "hdy"]}, r"unknown: \['hdy'\]. Did you mean 'hdi'\? Known metrics: hdi, "),
        ({"metrics": []}, "at least one"),
        ({"metrics": "hdi"}, r"write \['hdi'\]"),
        ({"max_tokens": 0}, "write 2048"),
        ({"rank_tol": 0.0}, "write 1e-6"),
        ({"method": "qr"}, '"whiten", "svd" or "exact"'),
        ({"history": None}, "write False"),
        ({"history": 3}, "write False"),
        ({"on_alert": "mail me"}, "must be a function that takes an Alert"),
        ({"alerts": [MeanAlignment(), MeanAlignment()]}, "Two rules"),
    ],
)
def test_an_argument_that_cannot_work_is_refused_at_construction(arguments, says):
    with pytest.raises(MisconfigurationError, match=says):
        HDICallback(**arguments)


def test_a_layer_pattern_that_matches_nothing_is_refused_before_training(tmp_path):
    model = LitClassifier()
    with pytest.raises(MisconfigurationError, match=LIT_LAYERS[0]):
        trainer_for(tmp_path, HDICallback(include=["decoder.*"])).fit(model, batches(count=2))
    assert model.losses == []


class WithoutAttention(LitClassifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(16, 8), nn.Flatten(), nn.Linear(12 * 8, 5))


def test_a_model_without_attention_is_a_warning_or_an_error_when_strict(tmp_path):
    with pytest.raises(MisconfigurationError, match=r"WithoutAttention.*Embedding"):
        trainer_for(tmp_path, HDICallback(strict=True)).fit(WithoutAttention(), batches(count=2))
    with pytest.warns(MonitoringWarning, match=r"nothing to watch.*Embedding"):
        trainer_for(tmp_path, HDICallback()).fit(WithoutAttention(), batches(count=2))


class Hangs(Remember):
    def log_metrics(self, metrics, step=None) -> None:
        if any(tag.startswith("hdi") for tag in metrics):
            raise ConnectionError("the server hung up")


def test_a_logger_that_raises_costs_one_warning_and_no_data(tmp_path):
    callback, good = HDICallback(every_n_steps=2), Remember()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_for(tmp_path, callback, logger=[Hangs(), good]).fit(LitClassifier(), batches(count=6))
    said = [str(warning.message) for warning in caught if issubclass(warning.category, MonitoringWarning)]
    assert said == ["logging to Hangs failed (ConnectionError: the server hung up). Training goes on."]
    assert list(good.readings()) == [0, 2, 4, 6]
    assert [record.step for record in read_records(callback.history_path)] == [0, 2, 4, 6]


def test_weights_that_are_not_finite_are_absent_with_the_reason_and_training_goes_on(tmp_path):
    model = LitClassifier()
    with torch.no_grad():
        model.net.blocks[0].attn.k_proj.weight[0, 0] = math.nan
    callback, logger = HDICallback(every_n_steps=2), Remember()
    trainer = trainer_for(tmp_path, callback, logger=logger)
    with pytest.warns(HeadCollapseWarning, match="hold NaN or infinity"):
        trainer.fit(model, batches(count=4))
    assert trainer.global_step == 4
    first = logger.readings()[0]
    assert f"hdi/{LIT_LAYERS[0]}" not in first
    assert first["hdi/min"] == first[f"hdi/{LIT_LAYERS[1]}"]
    record = read_records(callback.history_path)[0]
    assert record.absent[f"hdi/{LIT_LAYERS[0]}"] == "the weights are not finite"
    for line in callback.history_path.read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_the_layers_are_printed_once_at_start(tmp_path, caplog):
    with caplog.at_level("INFO"):
        trainer_for(tmp_path, HDICallback(every_n_steps=2)).fit(LitClassifier(), batches(count=4))
    said = [record.getMessage() for record in caplog.records if "hdi_callback watches" in record.getMessage()]
    assert len(said) == 1
    assert "2 attention layers, every 2 optimizer steps" in said[0]
    assert all(f"{name}: 4 heads of width 8" in said[0] for name in LIT_LAYERS)


def test_nothing_is_printed_when_not_verbose(tmp_path, caplog):
    with caplog.at_level("INFO"):
        trainer_for(tmp_path, HDICallback(verbose=False)).fit(LitClassifier(), batches(count=2))
    assert [record for record in caplog.records if "hdi_callback" in record.getMessage()] == []


def test_the_matrices_of_step_0_and_of_the_end_are_kept_beside_the_history(tmp_path):
    callback = HDICallback(every_n_steps=2, matrices_every=100, alerts=None)
    trainer_for(tmp_path, callback).fit(LitClassifier(), batches(count=7))
    run = read_history(callback.history_path)
    steps = [record.step for record in run.records()]
    assert len(steps) > 3
    assert run.matrix_steps(LIT_LAYERS[0]) == [steps[0], steps[-1]] == [0, steps[-1]]
    matrix, values = run.matrices(0, LIT_LAYERS[0])["pair_alignment"], run.records()[0].layers[LIT_LAYERS[0]].values
    above = torch.triu_indices(*matrix.shape, 1)
    assert matrix[above[0], above[1]].max() == pytest.approx(values["hdi_worst_alignment"], abs=1 / 508)
    assert matrix[above[0], above[1]].mean() == pytest.approx(values["hdi_alignment"], abs=1 / 508)
