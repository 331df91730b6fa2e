"""What heads attend to, through the whole monitor, against the attention weights that models return themselves."""

from __future__ import annotations

import math
import warnings
from contextlib import suppress
from copy import deepcopy

import pytest
import torch
from torch import nn

from hdi_callback import HeadDiversityMonitor, find_attention
from hdi_callback.attention.observe import AttentionObserver
from hdi_callback.errors import MonitoringWarning
from hdi_callback.monitoring.metrics import ROWS
from tests.attention.observe.oracle import require_a_kernel_with_softcap
from tests.attention.sweep.architectures import variants
from tests.models import HEADS, LAYERS, LENGTH, Attention, Classifier

METRICS = [
    "attention_entropy", "attention_entropy_min", "attention_samples", "attention_sink", "attention_overlap",
    "attention_alike", "attention_alike_worst", "attention_logit", "attention_logit_bound", "query_norm", "key_norm",
    "key_norm_spread",
]  # fmt: skip
B, T = 3, 11


def truth_of(weights: torch.Tensor, visible: torch.Tensor) -> dict[str, float]:
    """The formulas of the docs, row by row: weights (B, H, q, k), visible (B, 1, q, k)."""
    visible = visible.expand(weights.shape[0], 1, *weights.shape[2:])
    entropies, samples, rows, centred = [], [], [], []
    columns = torch.zeros(weights.shape[1], weights.shape[-1], dtype=torch.float64)
    for b in range(weights.shape[0]):
        for q in range(weights.shape[2]):
            shown = visible[b, 0, q]
            n = int(shown.sum())
            if n < 2:
                continue
            a = weights[b, :, q].double() * shown
            entropies.append(torch.special.entr(a).sum(-1) / math.log(n))
            samples.append(a.sum(-1) ** 2 / a.square().sum(-1))
            rows.append(a)
            centred.append((a - a.sum(-1, keepdim=True) / n) * shown)
            columns += a
    count = len(rows)
    product = sum(a @ a.T for a in rows)
    alike = sum(a @ a.T for a in centred)
    above = torch.triu(torch.ones_like(product, dtype=torch.bool), 1)

    def cosine(of: torch.Tensor) -> torch.Tensor:
        return (of / of.diagonal().sqrt()[:, None] / of.diagonal().sqrt()[None])[above]

    entropy = sum(entropies) / count
    return {
        "attention_entropy": float(entropy.mean()),
        "attention_entropy_min": float(entropy.min()),
        "attention_samples": float((sum(samples) / count).mean()),
        "attention_sink": float((columns / count).max()),
        "attention_overlap": float(cosine(product).mean()),
        "attention_alike": float(cosine(alike).mean()),
        "attention_alike_worst": float(cosine(alike).max()),
    }


def read(model: nn.Module, forward, **options) -> dict:
    with HeadDiversityMonitor(model, metrics=METRICS, **options) as monitor:
        monitor.arm()
        forward()
        return monitor.measure(0).record()


@pytest.mark.some_slow(quick=3)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "gemma2", "qwen3", "gpt_oss", "bloom"])
def test_attention_curves_agree_with_the_weights_that_the_model_returns(family, padding, implementation):
    torch.manual_seed(0)
    model = next(variants(family)).eval()
    require_a_kernel_with_softcap(model, implementation)
    mask = torch.ones(B, T, dtype=torch.long)
    mask[1, {"none": slice(0, 0), "left": slice(0, 4), "right": slice(T - 4, T)}[padding]] = 0
    tokens = torch.randint(5, 50, (B, T), generator=torch.Generator().manual_seed(1))
    options = {} if family == "bert" else {"use_cache": False}
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(tokens, attention_mask=mask, output_attentions=True, **options).attentions
    with suppress(ValueError):  # of a family that has no sdpa
        model.set_attn_implementation(implementation)
    record = read(model, lambda: model(tokens, attention_mask=mask, **options))
    causal = torch.ones(T, T, dtype=torch.bool).tril() if family != "bert" else torch.ones(T, T, dtype=torch.bool)
    visible = causal[None, None] & mask.bool()[:, None, None] & mask.bool()[:, None, :, None]
    measured = [layer for layer in record.layers.values() if "attention_entropy" in layer.values]
    assert len(measured) == len(attentions), record.absent
    for layer, weights in zip(measured, attentions):
        # A window hides keys beyond it, whose weights are zero.
        sees = visible & (weights > 0).any(1, keepdim=True) if family in ("gemma2", "gpt_oss") else visible
        truth = truth_of(weights[..., :T], sees)
        assert {name: layer.values[name] for name in truth} == pytest.approx(truth, abs=1e-5, rel=1e-5)
        assert layer.values["attention_logit"] <= layer.values.get("attention_logit_bound", math.inf) + 1e-5
        assert len(layer.arrays["attention_entropy"]) == weights.shape[1]
        assert layer.matrices["attention_overlap"].shape == (weights.shape[1],) * 2


@pytest.fixture
def model() -> Classifier:
    torch.manual_seed(0)
    return Classifier()


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(16, (4, LENGTH), generator=torch.Generator().manual_seed(seed))


def test_a_forward_that_does_not_train_is_not_read(model):
    alone = read(model, lambda: model(tokens(1)))

    def both():
        with torch.no_grad():
            model(tokens(0))
        model(tokens(1))

    together = read(model, both)
    assert together.scalars(METRICS) == pytest.approx(alone.scalars(METRICS), rel=1e-6)
    with HeadDiversityMonitor(model, metrics=METRICS) as monitor:
        monitor.arm(training_only=True)
        with torch.no_grad():
            model(tokens(0))
        with pytest.warns(match="ran only without autograd"):
            record = monitor.measure(0).record()
    assert record.scalars(METRICS) == {}
    assert f"attention rows/{LAYERS[0]}" in record.absent


def test_padding_that_is_passed_is_left_out(model):
    padded = torch.zeros(4, LENGTH, dtype=torch.bool)
    padded[2, -3:] = True
    with HeadDiversityMonitor(model, metrics=METRICS) as monitor:
        monitor.arm(padding_mask=padded)
        model(tokens())
        reported = monitor.measure(0).record().layers[LAYERS[0]]
    plain = read(model, lambda: model(tokens())).layers[LAYERS[0]]
    by_token = read(model, lambda: model(tokens()), padding=99).layers[LAYERS[0]]
    assert reported.values["query_norm"] != pytest.approx(plain.values["query_norm"], rel=1e-6)
    assert reported.values["attention_entropy"] != pytest.approx(plain.values["attention_entropy"], rel=1e-6)
    assert by_token.values == pytest.approx(plain.values)


def test_attention_curves_of_a_compiled_model_are_absent_with_the_reason(model):
    compiled = torch.compile(model, backend="eager")
    with pytest.warns(match="its graph cannot be observed"):
        record = read(compiled, lambda: compiled(tokens()))
    assert record.scalars(METRICS) == {}
    assert all("cannot be observed" in record.absent[f"attention rows/{name}"] for name in LAYERS)


@pytest.mark.parametrize("path", [LAYERS[0], LAYERS[0].rpartition(".")[0]])
def test_only_the_compiled_part_of_a_model_lacks_attention_curves(model, path):
    model.get_submodule(path).compile(backend="eager")
    with pytest.warns(match="its graph cannot be observed"):
        record = read(model, lambda: model(tokens()))
    torch._dynamo.reset()
    assert "its graph cannot be observed" in record.absent[f"attention rows/{LAYERS[0]}"]
    assert f"attention rows/{LAYERS[1]}" not in record.absent
    assert "attention_entropy" in record.layers[LAYERS[1]].values


@pytest.mark.parametrize("path", [LAYERS[0], LAYERS[0].rpartition(".")[0]])
def test_heads_of_a_compiled_part_stay_undecided_with_the_reason(model, path):
    layers = find_attention(model)
    model.get_submodule(path).compile(backend="eager")
    observer = AttentionObserver(model, layers, reduce_rows=lambda chunk: chunk.weights.sum())
    observer.arm()
    model(tokens())
    observer.disarm()
    torch._dynamo.reset()
    verdicts, reasons = observer.verdicts(layers), observer.absent
    assert verdicts[LAYERS[0]].state == "undecided"
    assert "its graph cannot be observed" in verdicts[LAYERS[0]].sentence
    assert verdicts[LAYERS[1]].state == "established"
    assert "its graph cannot be observed" in reasons[LAYERS[0]]


def test_attention_is_not_observed_if_no_metric_needs_it(model):
    with HeadDiversityMonitor(model) as monitor:
        monitor.arm()
        model(tokens())
        record = monitor.measure(0).record()
        monitor.arm()
        model(tokens())
        assert monitor._rows.observer.cores == [], "the heads are known"
    assert not set(METRICS) & {name for layer in record.layers.values() for name in layer.values}


def test_training_is_bit_identical_with_rows_at_every_step():
    def train(is_watched: bool) -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(3)
        model = Classifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        metrics = [*METRICS, "circuit_qk", "head_contribution_min", "weights_not_finite", "head_movement_min"]
        monitor = HeadDiversityMonitor(model, metrics=metrics) if is_watched else None
        losses = []
        for step in range(4):
            if monitor is not None:
                monitor.arm()
            loss = model(tokens(step)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if monitor is not None:
                assert len(monitor.measure(step).record().layers[LAYERS[0]].values) > len(METRICS)
            optimizer.step()
            losses.append(loss.item())
        if monitor is not None:
            monitor.close()
        return [*losses, float(torch.rand(()))], [parameter.detach().clone() for parameter in model.parameters()]

    (plain, weights), (watched, watched_weights) = train(False), train(True)
    assert plain == watched
    assert all(torch.equal(one, other) for one, other in zip(weights, watched_weights))


class Encoder(nn.Module):
    """Torch's own encoder, and the inputs of its attentions."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        return self.encoder(x, src_key_padding_mask=padding)

    def weights(self, x: torch.Tensor, padding: torch.Tensor) -> list[torch.Tensor]:
        """Of each layer, computed from its input by torch's attention itself, outside of any encoder."""
        found = []
        for layer in self.encoder.layers:
            attention = layer.self_attn
            found.append(attention(x, x, x, key_padding_mask=padding, average_attn_weights=False)[1].detach())
            x = layer(x, src_key_padding_mask=padding)
        return found


def count_kernels(monkeypatch) -> list[str]:
    calls: list[str] = []
    for name in ("_transformer_encoder_layer_fwd", "_native_multi_head_attention"):
        kernel = getattr(torch, name)
        counted = lambda *args, kernel=kernel, name=name, **more: calls.append(name) or kernel(*args, **more)  # noqa: E731
        monkeypatch.setattr(torch, name, counted)
    return calls


@pytest.mark.parametrize("mode", ["training", "evaluation, recorded by autograd"])
def test_attention_curves_of_torchs_encoder_agree_with_its_attention_weights(mode):
    torch.manual_seed(0)
    model, x = Encoder().train(mode == "training"), torch.randn(B, T, 16)
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[1, -4:] = True
    truths = [truth_of(one, ~(padding[:, None, None] | padding[:, None, :, None])) for one in model.weights(x, padding)]
    record = read(model, lambda: model(x, padding))
    assert len(record.layers) == len(truths) == 2
    for layer, truth in zip(record.layers.values(), truths):
        assert {name: layer.values[name] for name in truth} == pytest.approx(truth, abs=1e-5, rel=1e-5)


def test_a_rollout_of_an_armed_encoder_still_takes_the_fast_path(monkeypatch):
    model, x, calls = Encoder().train(), torch.randn(B, T, 16), count_kernels(monkeypatch)

    def rollout() -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            answer = model(x)
        model.train()
        return answer

    expected, alone = rollout(), list(calls)
    calls.clear()
    with HeadDiversityMonitor(model, metrics=METRICS) as monitor:
        monitor.arm(training_only=True)
        assert torch.equal(rollout(), expected)
        assert calls == alone == ["_transformer_encoder_layer_fwd"] * 2
        model(x).sum().backward()
        record = monitor.measure(0).record()
    assert all("attention_entropy" in layer.values for layer in record.layers.values())
    with HeadDiversityMonitor(model, metrics=METRICS) as monitor, pytest.warns(match="torch's fast path"):
        monitor.arm()
        rollout()
        record = monitor.measure(1).record()
    assert calls == alone * 2
    assert record.scalars(METRICS) == {}
    assert all("torch's fast path" in record.absent[f"attention rows/{name}"] for name in record.layers)


@pytest.mark.parametrize("copy", ["deepcopy", "saved"])
def test_a_copy_or_a_saved_armed_model_is_not_observed(copy, tmp_path):
    model = nn.ModuleDict({"encoder": Encoder(), "classifier": Classifier()})
    with HeadDiversityMonitor(model, metrics=METRICS) as monitor:
        monitor.arm()
        if copy == "saved":
            torch.save(model, tmp_path / "model.pt")
            twin = torch.load(tmp_path / "model.pt", weights_only=False)
        else:
            twin = deepcopy(model)
        x = torch.randn(B, T, 16)
        assert torch.equal(twin["encoder"](x), model["encoder"](x))
        twin["classifier"](tokens())
        with pytest.warns(match="no attention was observed in its module"):
            record = monitor.measure(0).record()
    assert "attention_entropy" in record.layers["encoder.encoder.layers.0.self_attn"].values
    assert "attention_entropy" not in record.layers[f"classifier.{LAYERS[0]}"].values


def test_per_head_lists_have_one_entry_for_each_head(model):
    layer = read(model, lambda: model(tokens())).layers[LAYERS[1]]
    for name in ("attention_entropy", "attention_sink", "attention_logit", "query_norm", "key_norm"):
        assert len(layer.arrays[name]) == HEADS


@torch.library.custom_op("hdi_callback_tests::flash_attn", mutates_args=())
def opaque(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A kernel of somebody else's, over ``(batch, length, heads, width)``, that keeps its weights to itself."""
    q, k, v = (one.transpose(1, 2) for one in (query, key, value))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()


class Opaque(Attention):
    def forward(self, x):
        q, k, v = (one(x).unflatten(-1, (self.num_heads, -1)) for one in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(opaque(q, k, v).flatten(2))


def test_attention_curves_of_an_opaque_kernel_are_absent_and_reported_once():
    torch.manual_seed(0)
    model = nn.ModuleList([Opaque(), Opaque()])
    model.forward = lambda x: model[1](model[0](x))
    said, records = [], []
    with HeadDiversityMonitor(model, metrics=["hdi", *METRICS]) as monitor, torch.no_grad():
        for step in range(3):
            with warnings.catch_warnings(record=True) as reported:
                warnings.simplefilter("always")
                monitor.arm()
                model(torch.randn(2, 6, 32))
                records.append(monitor.measure(step).record())
            said += [str(one.message) for one in reported]
    why = "its kernel `flash_attn.default` does not return its weights, "
    why += "and which of its arguments is the mask is not known"
    for record in records:
        assert record.absent == {f"{ROWS}/{name}": f"they are not known: {why}" for name in ("0", "1")}
        for layer in record.layers.values():
            assert "hdi" in layer.values
            assert set(METRICS).isdisjoint(layer.values), "never 0"
    assert sum(why in line for line in said) == 1


class PackedPictures(nn.Module):
    """Tokens of several pictures in one sequence; each picture attends to itself, in a call of its own."""

    def __init__(self, *, apart: bool) -> None:
        super().__init__()
        self.apart = apart
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.weights: list[torch.Tensor] = []

    def forward(self, x, lengths):
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        pieces = zip(*(part.split(lengths, 2) for part in (q, k, v)))
        self.weights, mixed = [], []
        for q, k, v in pieces:
            q = q.clone() if self.apart else q
            self.weights.append((q @ k.mT / 2).softmax(-1).detach())
            mixed.append(nn.functional.scaled_dot_product_attention(q, k, v))
        return self.out(torch.cat(mixed, 2).transpose(1, 2).flatten(2))


def test_rows_of_packed_pictures_are_those_of_all_pictures_together():
    torch.manual_seed(0)
    layer = PackedPictures(apart=False)
    model, x = nn.ModuleDict({"attn": layer}), torch.randn(1, 12, 16)
    model.forward = lambda *args: layer(*args)
    with HeadDiversityMonitor(model, metrics=METRICS, padding=None) as monitor:
        for step, lengths in enumerate([[12], [5, 7], [3, 4, 5]]):
            monitor.arm()
            model(x, lengths)
            values = monitor.measure(step).record().layers["attn"].values
            whole, seen = torch.zeros(1, 4, 12, 12), torch.zeros(1, 1, 12, 12, dtype=torch.bool)
            for start, weights in zip(torch.tensor([0, *lengths]).cumsum(0).tolist(), layer.weights):
                place = slice(start, start + weights.shape[-1])
                whole[..., place, place], seen[..., place, place] = weights, True
            truth = truth_of(whole, seen)
            for name in ("attention_entropy", "attention_entropy_min", "attention_samples", "attention_overlap"):
                assert values[name] == pytest.approx(truth[name], abs=1e-5), (name, lengths)


def test_rows_of_several_attentions_are_left_out_if_their_queries_are_stored_apart():
    torch.manual_seed(0)
    layer = PackedPictures(apart=True)
    model, x = nn.ModuleDict({"attn": layer}), torch.randn(1, 12, 16)
    model.forward = lambda *args: layer(*args)
    with HeadDiversityMonitor(model, metrics=METRICS, padding=None) as monitor:
        monitor.arm()
        model(x, [5, 7])
        with pytest.warns(MonitoringWarning, match="its module computes attention in 2 places"):
            record = monitor.measure(0).record()
    assert "its module computes attention in 2 places" in record.absent["attention rows/attn"]
