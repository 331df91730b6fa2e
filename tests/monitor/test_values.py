"""Every metric of a reading against a computation outside of the package."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hdi_callback.errors import NothingToWatchError
from hdi_callback.monitor import METRICS, HeadDiversityMonitor
from hdi_callback.monitor.metrics import HEADS, MATRICES, SOURCES, WHY_NOT
from hdi_callback.record import Record
from tests.monitor.models import HEADS as H
from tests.monitor.models import Model, after_a_call, inputs_of, naive, of_outputs, of_rows
from tests.studies.benchmarks.gpt import GPT

COUNTS = {"weights_not_finite": 0.0, "outputs_not_finite": 0.0, "head_unchanged": 0.0, "trains": 1.0,
          "parameters_still": 0.0}  # fmt: skip
CHANCE_OF_ENERGY = {"hdi_energy_alignment", "hdi_energy_worst_alignment"}  # another test asserts these


def read(model: nn.Module, *batches: torch.Tensor, **options) -> Record:
    """One reading of a model whose layers a first forward has shown."""
    with HeadDiversityMonitor(model, **options) as monitor:
        monitor.arm()
        for x in batches:
            model(x).square().mean().backward()
        return monitor.measure(0).record()


@pytest.mark.parametrize("eager", [False, True])
def test_every_metric_is_what_its_definition_says(eager):
    torch.manual_seed(0)
    model = Model(eager=eager)
    x = torch.randn(2, 9, 32)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before: list = []
    with HeadDiversityMonitor(model, metrics=[*METRICS]) as monitor:
        for step in range(2):
            now = [{name: one.detach().clone() for name, one in layer.named_parameters()} for layer in model.layers]
            monitor.arm()
            model(x).square().mean().backward()
            reading = monitor.measure(step)
            expected = [naive(*args) for args in zip(model.layers, inputs_of(model, x), before if step else now)]
            before = now
            optimizer.step()
            optimizer.zero_grad()
    record = reading.record()
    assert list(record.layers) == ["layers.0", "layers.1"]
    for layer, own in zip(record.layers.values(), expected):
        own |= COUNTS
        assert own.keys() | CHANCE_OF_ENERGY >= METRICS.keys(), "a metric that nothing outside of the package computes"
        assert layer.values.keys() == METRICS.keys()
        for name in METRICS.keys() - CHANCE_OF_ENERGY:
            assert layer.values[name] == pytest.approx(own[name], rel=2e-5, abs=2e-6), name


def test_the_energy_lens_of_one_pair_is_its_rv_coefficient_against_chance():
    torch.manual_seed(1)
    model = Model(1)
    layer = read(model, torch.randn(2, 5, 32)).layers["layers.0"]
    overlap = naive(model.layers[0], torch.randn(2, 5, 32))["_energy"]
    # One pair: the mean and the worst are the same, and both are overlap against chance.
    assert layer.values["hdi_energy_alignment"] == pytest.approx(layer.values["hdi_energy_worst_alignment"])
    G = model.layers[0].key.weight.detach().double().view(2, 8, 32)
    spectra = [(one @ one.T) for one in G]
    chance = float(spectra[0].trace() * spectra[1].trace() / 32 / (spectra[0].norm() * spectra[1].norm()))
    assert layer.values["hdi_energy_alignment"] == pytest.approx((overlap - chance) / (1 - chance), abs=1e-5)


def test_rows_are_the_attention_that_transformers_reports():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=4, n_embd=32, vocab_size=50, n_positions=16, attn_implementation="eager",
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).train()
    ids = torch.randint(0, 50, (2, 12))
    with HeadDiversityMonitor(model) as monitor:
        monitor.arm()
        model(ids, labels=ids).loss.backward()
        record = monitor.measure(0).record()
    attentions = model(ids, output_attentions=True).attentions
    assert len(record.layers) == 2
    for layer, attention in zip(record.layers.values(), attentions):
        for name, value in of_rows(attention.detach(), torch.zeros(1)).items():
            if name != "attention_logit":
                assert layer.values[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_what_is_kept_of_heads_and_pairs_has_their_shape():
    layer = read(Model(1), torch.randn(2, 5, 32)).layers["layers.0"]
    assert set(layer.heads) == {name for name, detail in HEADS.items() if "movement of" not in detail.source}
    assert set(layer.matrices) == set(MATRICES)
    of_keys = {"overlap", "pair_alignment", "energy_pair_alignment"}
    for name, matrix in layer.matrices.items():
        assert matrix.shape == ((2, 2) if name in of_keys else (H, 32, 32) if name == "attention_pattern" else (H, H))
        assert matrix.dtype == torch.float32
        assert matrix.device.type == "cpu"
    assert layer.heads["worst_alignment_pair"] == [0, 1]
    assert all(isinstance(rank, int) for rank in layer.heads["rank"])
    assert len(layer.heads["attention_entropy"]) == H
    assert layer.absent["movement of weights"] == WHY_NOT["movement of weights"]


def test_accumulated_forwards_are_one_sample():
    torch.manual_seed(0)
    model = Model(1)
    x = torch.randn(4, 6, 32)
    together = read(model, x).layers["layers.0"].values
    apart = read(model, x[:2], x[2:]).layers["layers.0"].values
    assert apart == pytest.approx(together, rel=1e-5, abs=1e-6)


def test_padding_counts_nowhere():
    torch.manual_seed(0)
    model = nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(2, 6, 32)
    padded = torch.cat([x, torch.full((2, 3, 32), 7.0)], 1)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[:, 6:] = True
    found = []
    for tokens, hidden in ((x, None), (padded, mask)):
        with HeadDiversityMonitor(model) as monitor:
            monitor.arm()
            model(tokens, tokens, tokens, key_padding_mask=hidden, need_weights=False)[0].sum().backward()
            found.append(monitor.measure(0).record().layers["the model"].values)
    plain, without = found
    assert without == pytest.approx(plain, rel=1e-5, abs=1e-6)
    assert {"head_covariance", "attention_entropy"} <= plain.keys()


def test_outputs_of_torch_attention_are_what_its_projection_takes():
    torch.manual_seed(0)
    model = nn.MultiheadAttention(32, 4, batch_first=True, bias=False)
    x = torch.randn(2, 7, 32)
    with HeadDiversityMonitor(model) as monitor:
        monitor.arm()
        model(x, x, x)[0].sum().backward()
        values = monitor.measure(0).record().layers["the model"].values
    q, k, v = ((x @ w.T).view(2, 7, 4, 8).transpose(1, 2) for w in model.in_proj_weight.detach().chunk(3))
    o = (q @ k.mT / 8**0.5).softmax(-1) @ v
    weight = model.out_proj.weight.detach().T.reshape(4, 8, 32)
    for name, value in of_outputs(o.transpose(1, 2).flatten(0, 1).double(), weight.double()).items():
        assert values[name] == pytest.approx(value, rel=1e-4), name


def test_a_second_reading_at_one_step_is_not_compared():
    model = Model(1)
    with after_a_call(model, lambda: model(torch.randn(1, 4, 32)), metrics=["head_movement_min"]) as one:
        assert "head_movement_min" not in one.measure(3).record().layers["layers.0"].values
        assert "head_movement_min" not in one.measure(3).record().layers["layers.0"].values
        layer = one.measure(4).record().layers["layers.0"]
    assert layer.values["head_movement_min"] == 0.0
    assert layer.values["head_unchanged"] == 1.0


def test_weights_and_outputs_that_are_not_finite_are_counted_by_head():
    torch.manual_seed(0)
    model = Model(2)
    with torch.no_grad():
        model.layers[1].value.weight[0, 0] = torch.nan  # of the first group: heads 0 and 1
    record = read(model, torch.randn(2, 5, 32))
    healthy, broken = record.layers.values()
    assert healthy.values["weights_not_finite"] == healthy.values["outputs_not_finite"] == 0.0
    assert broken.values["weights_not_finite"] == broken.values["outputs_not_finite"] == 2.0
    assert broken.heads["weights_not_finite"] == broken.heads["outputs_not_finite"] == [1, 1, 0, 0]
    assert "hdi" in broken.values  # the keys are as they were
    assert "head_covariance" not in broken.values
    assert broken.absent["head outputs"] == WHY_NOT["head outputs"]


def test_a_frozen_layer_says_that_it_does_not_train():
    model = Model(2)
    model.layers[0].requires_grad_(False)
    layers = read(model, torch.randn(2, 5, 32, requires_grad=True)).layers
    assert [layer.values["trains"] for layer in layers.values()] == [0.0, 1.0]


def test_the_catalogue_is_of_one_piece():
    assert {metric.source for metric in METRICS.values()} <= {*SOURCES, "training"}
    assert {detail.source for table in (HEADS, MATRICES) for detail in table.values()} <= set(SOURCES)
    assert WHY_NOT.keys() >= {metric.source for metric in METRICS.values()}
    assert all(metric.summary.endswith(".") for metric in METRICS.values())


def test_a_parameter_stands_still_where_no_bit_of_it_has_changed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.MultiheadAttention(32, 4, batch_first=True), nn.Linear(32, 1))
    attention, x = model[0], torch.randn(2, 5, 32)
    attention.q_bias, attention.frozen = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2), requires_grad=False)
    with after_a_call(model, lambda: attention(x, x, x)) as monitor, torch.no_grad():
        records = [monitor.measure(0).record()]
        attention.in_proj_bias[5] += 1e-3
        records.append(monitor.measure(1).record())
        model[1].weight[0, 0] += 1e-3
        attention.q_bias.zero_()
        records.append(monitor.measure(2).record())
    (facts,) = [layer.description() for layer in monitor.layers]
    assert facts["parameters"] == {"q_bias": 1, "frozen": 1, "in_proj_bias": 1, "out_proj.bias": 1}
    first, *later = [record.layers["0"] for record in records]
    assert "parameters_still" not in first.values
    still = [dict(zip(facts["parameters"], layer.heads["parameter_still"])) for layer in later]
    assert [[name for name, value in each.items() if value == 1] for each in still] == [
        ["q_bias", "out_proj.bias"],
        ["in_proj_bias", "out_proj.bias"],
    ]
    assert [layer.values["parameters_still"] for layer in later] == [2.0, 2.0]


def test_a_training_step_within_torch_func_is_as_it_is_and_its_forwards_are_absent():
    gradients = []
    for is_watched in (False, True):
        torch.manual_seed(0)
        model, x = GPT(2, 48, 4, 16), torch.randint(256, (3, 16))
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

        def loss(weights, x, model=model):
            return torch.func.functional_call(model, weights, (x,))

        with HeadDiversityMonitor(model) as monitor:
            for step in range(3):
                if is_watched:
                    monitor.arm()
                if step == 1:
                    model(x).backward()
                gradients.append(torch.func.grad(loss)(weights, x))
                gradients.append(torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x[:, None]))
                if is_watched and step == 0:
                    with pytest.raises(NothingToWatchError):
                        monitor.measure(step)
                elif is_watched:
                    record = monitor.measure(step).record()
                    names = [name for name, layer in record.layers.items() if "attention_entropy" in layer.values]
                    assert len(names) == (2 if step == 1 else 0)
        if is_watched:
            reasons = {layer.absent["head outputs"] for layer in record.layers.values()}
            assert reasons == {"it was not called in a forward that was captured"}
    half = len(gradients) // 2
    for alone, watched in zip(gradients[:half], gradients[half:]):
        assert all(torch.equal(alone[name], watched[name]) for name in alone)
