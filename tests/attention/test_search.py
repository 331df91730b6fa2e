"""Heads that only a real forward shows: watched from the first armed forward of a training on."""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from hdi_callback import HDICallback, HeadDiversityMonitor, load_history, replay
from hdi_callback.attention import survey
from hdi_callback.attention.finding.runtime_finder import RuntimeFinder
from hdi_callback.attention.layer.registry import Place
from hdi_callback.attention.trace import kinds
from hdi_callback.attention.trace.inputs import Inputs
from hdi_callback.attention.trace.layers import layers_in
from hdi_callback.core import head_diversity
from hdi_callback.errors import MonitoringWarning, UnsupportedAttentionWarning
from hdi_callback.monitoring.metrics import COVARIANCE, KEYS, TOKENS
from tests.attention import models as by_hand
from tests.attention.models import D


class NeedsTables(by_hand.Interleaved):
    """Inputs that nobody can make up."""

    def forward(self, x, tables):
        return super().forward(x * tables["scale"])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = NeedsTables(), by_hand.NanoGPT(), NeedsTables()

    def forward(self, batch):
        x, tables = batch["x"], {"scale": torch.ones(1)}
        return self.third(self.second(self.first(x, tables)), tables)


def test_refused_layers_are_found_in_the_first_armed_forward():
    torch.manual_seed(0)
    model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor = HeadDiversityMonitor(model, metrics=["hdi", "head_correlation"])
        assert [layer.name for layer in monitor.layers] == ["second"]
        assert [refusal.name for refusal in monitor.refused] == ["first", "third"]
        assert all("the first captured forward decides" in refusal.reason for refusal in monitor.refused)
    with monitor, warnings.catch_warnings():
        warnings.simplefilter("error")
        tags = []
        for step in range(2):
            monitor.arm()
            model({"x": torch.randn(2, 5, D)})
            tags.append(monitor.measure(step).record().scalars(["hdi", "head_correlation"]))
        assert [layer.name for layer in monitor.layers] == ["first", "second", "third"], "in the order of the model"
        assert monitor.refused == ()
        assert {"hdi/first", "hdi/second", "hdi/third", "head_correlation/second"} <= set(tags[0])
        assert "head_correlation/first" not in tags[0]
        assert {"head_correlation/first", "head_correlation/third"} <= set(tags[1])
        keys = model.first.qkv_proj.weight.detach().view(4, 3, 8, D)[:, 1]
        assert tags[1]["hdi/first"] == pytest.approx(float(head_diversity(keys).index), abs=1e-6)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_curves_that_the_first_reading_lacks_of_layers_found_in_its_forward_have_a_reason():
    torch.manual_seed(0)
    model, names = Model(), ["hdi", "head_correlation", "hdi_keys", "token_rank", "attention_entropy"]
    with HeadDiversityMonitor(model, metrics=names) as monitor:
        records = []
        for step in range(2):
            monitor.arm()
            model({"x": torch.randn(2, 5, D)}).square().mean().backward()
            records.append(monitor.measure(step).record())
    late = "its heads were found in the forward of this reading, and are captured from the next one that is read"
    for layer in ("first", "third"):
        values = records[0].layers[layer].values
        assert [name in values for name in names] == [True, False, False, False, True]
        assert records[0].absent[f"{COVARIANCE}/{layer}"] == late
        assert {records[0].absent[f"{source}/{layer}"] for source in (KEYS, TOKENS)} == {f"they are not known: {late}"}
    assert records[1].absent == {}
    for layer in records[1].layers.values():
        assert set(names) <= set(layer.values)


def test_without_check_heads_no_layer_is_searched_in_the_first_forward():
    model = Model()
    with pytest.warns(UnsupportedAttentionWarning) as reported:
        monitor = HeadDiversityMonitor(model, check_heads=False)
    said = [str(warning.message) for warning in reported]
    assert [("`first`" in one, "`third`" in one) for one in said] == [(True, False), (False, True)]
    assert all("With check_heads=True the first captured forward may show them." in one for one in said)
    with monitor:
        monitor.arm()
        model({"x": torch.randn(2, 5, D)})
        monitor.measure(0)
        assert [layer.name for layer in monitor.layers] == ["second"]


class TalkingHeads(by_hand.Interleaved):
    """Heads that mix in front of the softmax, and inputs that nobody can make up."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x, tables):
        query, key, value = self.qkv_proj(x * tables["scale"]).unflatten(-1, (4, 3, -1)).permute(3, 0, 2, 1, 4)
        scores = query @ key.transpose(-2, -1)
        rows = self.mix(scores.movedim(1, -1)).movedim(-1, 1).softmax(-1)
        return self.o_proj((rows @ value).transpose(1, 2).flatten(2))


def test_modules_that_the_first_forward_does_not_decide_are_reported_once_with_the_reason():
    torch.manual_seed(0)
    model = Model()
    model.first, model.third = TalkingHeads(), TalkingHeads()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor = HeadDiversityMonitor(model, metrics=["hdi"])
    reported = []
    with monitor:
        for step in range(4):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                monitor.arm()
                model({"x": torch.randn(2, 5, D)})
                monitor.measure(step)
            reported.append([str(one.message) for one in caught])
    assert [len(messages) for messages in reported] == [1, 0, 0, 0]
    assert "`first`" in reported[0][0]
    assert "The same holds for `third`." in reported[0][0]
    assert [refusal.name for refusal in monitor.refused] == ["first", "third"]
    for refusal in monitor.refused:
        assert refusal.reason in reported[0][0]
        assert "made up" not in refusal.reason


def test_a_reading_before_any_forward_warns_once_of_the_layers_that_wait_for_one():
    model = Model()
    monitor = HeadDiversityMonitor(model, metrics=["hdi"])
    with monitor:
        with pytest.warns(
            MonitoringWarning, match="first captured forward may show those of `first`, `third`"
        ) as reported:
            monitor.measure(0)
            monitor.measure(1)
        assert len(reported) == 1


class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Model()

    def training_step(self, batch, batch_idx):
        return self.model({"x": batch}).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(folder, max_steps, checkpoint=None):
    torch.manual_seed(0)
    lit = Lit()
    callback = HDICallback(2, history=str(folder / "history.jsonl"), verbose=False)
    trainer = L.Trainer(
        max_steps=max_steps, callbacks=[callback], logger=False, accelerator="cpu", enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, enable_checkpointing=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnsupportedAttentionWarning)
        warnings.simplefilter("error", MonitoringWarning)
        trainer.fit(lit, DataLoader(torch.randn(40, 5, D), batch_size=4), ckpt_path=checkpoint)
    trainer.save_checkpoint(folder / "last.ckpt")
    return callback


def test_a_lightning_run_watches_them_and_resumes(tmp_path):
    callback = fit(tmp_path, 4)
    names = ["model.first", "model.second", "model.third"]
    assert [layer.name for layer in callback.monitor.layers] == names
    fit(tmp_path, 8, tmp_path / "last.ckpt")
    frame = load_history(tmp_path / "history.jsonl").dropna(subset=["hdi"])
    for name in names:
        assert frame[frame["layer"] == name]["step"].tolist() == [0, 2, 4, 6, 8]
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "run"][-1]
    assert [layer["name"] for layer in last["layers"]] == names
    replay(tmp_path / "history.jsonl")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_each_kind_of_module_is_traced_once_for_any_number_of_layers(monkeypatch, device):
    read = []
    monkeypatch.setattr(kinds, "layers_in", lambda *args, **kwargs: read.append(args[3]) or layers_in(*args, **kwargs))
    counts = []
    for depth in (3, 12):
        read.clear()
        with torch.device(device):
            model = nn.Sequential(*(by_hand.NanoGPT() if at % 2 else by_hand.Timm() for at in range(depth)))
        assert len(survey(model).layers) == depth
        counts.append(len(read))
    # The whole is read as well, and only while it holds few layers.
    assert counts[1] <= counts[0]
    assert len({name for name in read if name}) == 2, "one of each kind"


class OfOthers(nn.Module):
    """Maps with the names of attention that lie elsewhere in the model, and inputs that come only once."""

    def __init__(self, first: nn.Module, second: nn.Module):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = first, second, second

    def forward(self, stream):
        x = next(stream["x"])
        return self.q_proj(x) * self.k_proj(x).sigmoid() + self.v_proj(x)


class Lends(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.called, self.idle = OfOthers(self.first, self.second), OfOthers(self.first, self.second)

    def forward(self, x):
        return self.called({"x": (one for one in [x])})


def test_a_called_module_that_only_lends_its_projections_is_refused_if_it_cannot_run_again():
    model = Lends()
    found = survey(model, forward=lambda: model(torch.randn(2, 5, D)))
    assert found.layers == ()
    (refused,) = found.refused
    assert refused.name == "called"
    assert "could not be run" in refused.reason


def test_layers_are_those_that_are_included_and_not_excluded():
    model = nn.ModuleDict({name: nn.ModuleList(by_hand.NanoGPT() for _ in range(2)) for name in ("left", "right")})
    found = survey(model, include=["left*"], exclude=["*.1"])
    assert [layer.name for layer in found.layers] == ["left.0"]
    assert [layer.name for layer in survey(model, exclude=["*.1"]).layers] == ["left.0", "right.0"]


class Takes(nn.Module):
    """Something around an attention, whose input can be taken apart only once."""

    def __init__(self, part: nn.Module | None):
        super().__init__()
        self.one, self.two, self.part = nn.Linear(D, D), nn.Linear(D, D), part

    def forward(self, tokens):
        raise RuntimeError("no second time")


def test_a_module_that_cannot_run_alone_has_a_reason_unless_its_child_is_read():
    around, alone = Takes(by_hand.NanoGPT()), Takes(None)
    places = [Place("around", around, nn.Module()), Place("alone", alone, nn.Module())]
    places.append(Place("around.part", around.part, around))
    finder = RuntimeFinder(places)
    inputs = [Inputs((torch.randn(2, 5, D),), {})]
    layers = finder.found({place.name: inputs for place in places})
    assert [layer.name for layer in layers] == ["around.part"]
    assert finder.reasons == {
        "alone": "it could not be run by itself with its arguments from the first captured forward: it raises "
        "RuntimeError (no second time)"
    }


@pytest.mark.parametrize("is_undecided", [True, False])
def test_a_module_is_decided_if_its_refusal_does_not_wait_for_another_run(is_undecided):
    found = SimpleNamespace(layer=None, reason="its heads mix", is_undecided=is_undecided)
    tracer = SimpleNamespace(found_in=lambda name, module, ways: [found])
    finder: Any = SimpleNamespace(_tracer=tracer, reasons={}, decided=set(), _failed=[])
    place: Any = SimpleNamespace(name="attention", module=nn.Identity())
    assert RuntimeFinder._found(finder, place, ()) == []
    assert finder.reasons == {"attention": "its heads mix"}
    assert finder.decided == (set() if is_undecided else {"attention"})
