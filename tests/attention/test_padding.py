"""Padding is left out: readings of a padded batch against those of its tokens alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hdi_callback import HeadDiversityMonitor, head_covariance, watch_heads
from hdi_callback.attention.calls import Frame
from hdi_callback.attention.capture.padding import _over_pairs, find_padding
from hdi_callback.errors import MisconfigurationError, MonitoringWarning
from hdi_callback.monitoring.history import read_records
from tests.attention.test_capture import truth_of
from tests.models import Classifier

METRICS = ["head_covariance", "head_correlation", "head_covariance_error", "head_correlation_error"]
PADDED = torch.tensor([[False] * 7, [False] * 4 + [True] * 3, [False] * 5 + [True] * 2])
LEFT = PADDED.flip(1)


def expected(outputs: torch.Tensor, layer, padded: torch.Tensor) -> dict[str, float]:
    """The covariance of the tokens that are no padding, sequence by sequence."""
    there = [row[~out] for row, out in zip(outputs.double(), padded)]
    heads = torch.cat(there).unflatten(-1, (layer.num_heads, -1))
    values = head_covariance(heads, layer.weight("output").detach().double(), lengths=[len(one) for one in there])
    return {
        "head_covariance": float(values.covariance),
        "head_correlation": float(values.correlation),
        "head_covariance_error": float(values.covariance_error),
        "head_correlation_error": float(values.correlation_error),
    }


def recorded(module: nn.Module, run) -> torch.Tensor:
    """What a projection really gets."""
    got = []
    handle = module.register_forward_pre_hook(lambda _, args: got.append(args[0].detach().clone()))
    run()
    handle.remove()
    return got[0]


def read(model: nn.Module, run, **options):
    monitor = HeadDiversityMonitor(model, metrics=METRICS, **options)
    with monitor:
        for step in range(2):  # layers that the first forward shows have their outputs from the second on
            monitor.arm()
            run()
            record = monitor.measure(step).record()
        return monitor, record


def require(model: nn.Module, run, projections: dict[str, str], padded: dict[str, torch.Tensor], **options) -> None:
    """Every layer reads as its unpadded tokens alone."""
    truth = {name: recorded(model.get_submodule(path), run) for name, path in projections.items()}
    monitor, record = read(model, run, **options)
    layers = {layer.name: layer for layer in monitor.layers}
    assert set(projections) <= set(layers)
    for name, outputs in truth.items():
        values = record.layers[name].values
        assert {tag: values[tag] for tag in METRICS} == pytest.approx(
            expected(outputs, layers[name], padded[name]), rel=1e-3, abs=1e-6
        )


# --- torch's own encoder, whose masks are True where a token is padding


@pytest.mark.parametrize("padded", [PADDED, LEFT], ids=["right", "left"])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_padding_of_torchs_encoder_is_left_out(padded, kind, batch_first):
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=batch_first)
    model = nn.TransformerEncoder(block, 1, enable_nested_tensor=False)
    x = torch.randn(3, 7, 32)
    mask = padded if kind == "bool" else torch.zeros(3, 7).masked_fill(padded, -torch.inf)
    arguments = x if batch_first else x.transpose(0, 1)
    outputs = truth_of(model.layers[0].self_attn, arguments, arguments, arguments, key_padding_mask=mask)
    outputs = outputs if batch_first else outputs.transpose(0, 1)
    monitor, record = read(model, lambda: model(arguments, src_key_padding_mask=mask))
    values = record.layers["layers.0.self_attn"].values
    truth = expected(outputs, monitor.layers[0], padded)
    assert {tag: values[tag] for tag in METRICS} == pytest.approx(truth, rel=1e-3, abs=1e-6)
    counted = expected(outputs, monitor.layers[0], torch.zeros_like(padded))
    assert counted["head_correlation"] != pytest.approx(truth["head_correlation"], rel=0.1)


# --- transformers


def batch(padded: torch.Tensor) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 50, padded.shape, generator=torch.Generator().manual_seed(1)).masked_fill(padded, 0)
    return {"input_ids": ids, "attention_mask": (~padded).long()}


@pytest.mark.some_slow(quick=1)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_padding_of_bert_is_left_out(implementation):
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        attn_implementation=implementation,
    )  # fmt: skip
    model = BertModel(config).eval()
    names = {layer.name: layer for layer in HeadDiversityMonitor(model, check_heads=False).layers}
    paths = {name: f"encoder.layer.{place}.attention.output.dense" for place, name in enumerate(names)}
    require(model, lambda: model(**batch(PADDED)), paths, dict.fromkeys(paths, PADDED))
    by_position = batch(PADDED)
    require(model, lambda: model(*by_position.values()), paths, dict.fromkeys(paths, PADDED))


@pytest.mark.some_slow(quick=2)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("way", ["as it is", "reentrant", "not reentrant"])
def test_left_padding_of_llama_is_left_out_also_under_checkpointing(implementation, way):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, attn_implementation=implementation, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    if way != "as it is":
        model.gradient_checkpointing_enable({"use_reentrant": way == "reentrant"})
        model.enable_input_require_grads()
    paths = {f"model.layers.{place}.self_attn": f"model.layers.{place}.self_attn.o_proj" for place in range(2)}
    require(model, lambda: model(**batch(LEFT)).logits.sum().backward(), paths, dict.fromkeys(paths, LEFT))


@pytest.mark.slow
def test_queries_of_cross_attention_have_the_padding_of_the_decoder():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).eval()
    layers = {
        "encoder.block.0.layer.0.SelfAttention": LEFT,
        "decoder.block.0.layer.0.SelfAttention": PADDED,
        "decoder.block.0.layer.1.EncDecAttention": PADDED,
    }
    # Encoder and decoder of equal length, so that nothing but its name tells whose a mask is.
    arguments = {**batch(LEFT), "decoder_input_ids": batch(PADDED)["input_ids"]}
    paths = {name: f"{name}.o" for name in layers}
    require(model, lambda: model(**arguments, decoder_attention_mask=(~PADDED).long()), paths, layers)
    unpadded = {
        name: padded if name.startswith("encoder") else PADDED[:1].repeat(3, 1) for name, padded in layers.items()
    }
    require(model, lambda: model(**arguments), paths, unpadded)


# --- modules written by hand


class ByHand(nn.Module):
    """Attention that is handed a mask, whatever its form."""

    def __init__(self, use) -> None:
        super().__init__()
        self.num_heads, self.use = 4, use
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(32, 32) for _ in range(4))

    def attend(self, x, mask):
        q, k, v = (proj(x).unflatten(-1, (4, -1)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.use(mask))
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def forward(self, x, mask=None):
        return self.attend(x, mask)


class WithPaddingMask(ByHand):
    def forward(self, x, padding_mask=None):
        return self.attend(x, padding_mask)


class WithAttentionMask(ByHand):
    def forward(self, x, attention_mask=None):
        return self.attend(x, attention_mask)


def to_scores(mask):
    return torch.zeros(mask.shape).masked_fill(mask, -1e9)[:, None, None]


CAUSAL = torch.ones(7, 7, dtype=torch.bool).tril()
WAYS = {
    "keep, over tokens": (ByHand, ~PADDED, lambda mask: mask[:, None, None]),
    "keep, over pairs": (ByHand, (~PADDED)[:, None, None], lambda mask: mask),
    "keep, over pairs, causal": (ByHand, (~PADDED)[:, None, None] & CAUSAL, lambda mask: mask),
    "hide, over tokens": (ByHand, PADDED, lambda mask: ~mask[:, None, None]),
    "added to scores": (ByHand, to_scores(PADDED), lambda mask: mask),
    "padding_mask": (WithPaddingMask, PADDED, lambda mask: ~mask[:, None, None]),
    "attention_mask of integers": (WithAttentionMask, (~PADDED).long(), lambda mask: mask.bool()[:, None, None]),
    "attention_mask of numbers": (WithAttentionMask, (~PADDED).float(), lambda mask: mask.bool()[:, None, None]),
}


@pytest.mark.parametrize("way", WAYS)
def test_padding_of_a_module_written_by_hand_is_left_out(way):
    kind, mask, use = WAYS[way]
    torch.manual_seed(0)
    model, x = nn.ModuleDict({"attn": kind(use)}), torch.randn(3, 7, 32)
    require(model, lambda: model["attn"](x, mask), {"attn": "attn.out_proj"}, {"attn": PADDED})


def test_a_mask_that_can_be_read_in_two_ways_leaves_the_reading_absent_with_the_reason():
    torch.manual_seed(0)
    mask = torch.tensor([[True] * 4 + [False] * 3, [True] * 5 + [False] * 2, [True] * 6 + [False]])
    model = nn.ModuleDict({"attn": ByHand(lambda mask: mask[:, None, None])})
    _, record = read(model, lambda: model["attn"](torch.randn(3, 7, 32), mask))
    assert not set(METRICS) & set(record.layers["attn"].values)
    assert "can be read in two ways" in record.absent["head outputs/attn"]


@pytest.mark.parametrize("padding", [0, lambda ids, **_: ids == 0])
def test_padding_can_be_declared_by_a_token_or_a_function(padding):
    class Embedded(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.attn = nn.Embedding(50, 32), ByHand(lambda mask: None)

        def forward(self, ids):
            return self.attn(self.embed(ids))

    torch.manual_seed(0)
    model, ids = Embedded(), batch(PADDED)["input_ids"]
    require(model, lambda: model(ids), {"attn": "attn.out_proj"}, {"attn": PADDED}, padding=padding)
    # Without it nothing says that there is padding, and with None masks are not asked.
    require(model, lambda: model(ids), {"attn": "attn.out_proj"}, {"attn": torch.zeros_like(PADDED)})


def test_padding_can_be_passed_when_arming():
    torch.manual_seed(0)
    model, x = nn.ModuleDict({"attn": ByHand(lambda mask: None)}), torch.randn(3, 7, 32)
    outputs = recorded(model["attn"].out_proj, lambda: model["attn"](x))
    with HeadDiversityMonitor(model, metrics=METRICS, check_heads=False) as monitor:
        monitor.arm(padding_mask=PADDED)
        model["attn"](x)
        values = monitor.measure(0).record().layers["attn"].values
        truth = expected(outputs, monitor.layers[0], PADDED)
    assert {tag: values[tag] for tag in METRICS} == pytest.approx(truth, rel=1e-3, abs=1e-6)


def test_a_mask_that_does_not_fit_the_windows_of_a_layer_is_reported_once():
    class Windows(ByHand):
        def forward(self, x, attention_mask=None):
            return self.attend(x.view(6, 4, 32), None).view(3, 8, 32)

    model = nn.ModuleDict({"attn": Windows(lambda mask: None)})
    with HeadDiversityMonitor(model, metrics=METRICS) as monitor:
        with pytest.warns(MonitoringWarning, match="padding tokens of `attn` are not known") as caught:
            for step in range(3):
                monitor.arm()
                model["attn"](torch.randn(3, 8, 32), torch.ones(3, 8))
                monitor.measure(step)
        assert len(caught) == 1


@pytest.mark.parametrize("way", ["whole", "in place"])
def test_padding_of_a_compiled_model_is_left_out(way):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(WithPaddingMask(lambda mask: None if mask is None else ~mask[:, None, None]))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = model[0]

        def forward(self, x, padding_mask):
            return self.attn(x, padding_mask)

    outer, x = Outer(), torch.randn(3, 7, 32)
    outputs = recorded(outer.attn.out_proj, lambda: outer(x, PADDED))
    with HeadDiversityMonitor(outer, metrics=METRICS, check_heads=False) as monitor:
        compiled = torch.compile(outer, backend="aot_eager")
        if way == "in place":
            compiled = outer
            outer.compile(backend="aot_eager")
        for _ in range(2):
            monitor.arm()
            compiled(x, PADDED).sum().backward()
            values = monitor.measure(0).record().layers["attn"].values
            truth = expected(outputs, monitor.layers[0], PADDED)
            assert {tag: values[tag] for tag in METRICS} == pytest.approx(truth, rel=1e-3, abs=1e-6)
    torch._dynamo.reset()


class Made(nn.Module):
    """Makes its mask itself, within what is compiled."""

    def __init__(self):
        super().__init__()
        self.embed, self.attn = nn.Embedding(50, 32), ByHand(lambda mask: mask)

    def forward(self, ids):
        return self.attn(self.embed(ids), (ids != 0)[:, None, None])


@pytest.mark.parametrize("way", ["module", "function"])
def test_masks_inside_a_compiled_graph_are_reported_as_not_read(way):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, ids = Made(), batch(PADDED)["input_ids"]
    with HeadDiversityMonitor(model, metrics=METRICS, check_heads=False) as monitor:
        run = torch.compile(model if way == "module" else lambda ids: model(ids), backend="aot_eager")
        with pytest.warns(MonitoringWarning, match="inside a compiled graph are not observed.*padding=None") as caught:
            for step in range(2):
                monitor.arm()
                run(ids).sum().backward()
                monitor.measure(step)
        assert len(caught) == 1
    torch._dynamo.reset()


def test_a_compiled_model_without_masks_gives_no_padding_warning(recwarn):
    torch._dynamo.reset()
    model, x = nn.Sequential(WithPaddingMask(lambda mask: None)), torch.randn(3, 7, 32)
    with HeadDiversityMonitor(model, metrics=METRICS, check_heads=False) as monitor:
        model[0].compile(backend="aot_eager")
        monitor.arm()
        model[0](x).sum().backward()
        assert "head_correlation" in monitor.measure(0).record().layers["0"].values
    plain = Classifier()
    with HeadDiversityMonitor(plain, metrics=METRICS, check_heads=False) as monitor:
        monitor.arm()
        torch.compile(lambda ids: plain(ids), backend="aot_eager")(torch.randint(16, (2, 12))).sum().backward()
        assert "head_correlation" in monitor.measure(0).record().layers["blocks.0.attn"].values
    assert not [one for one in recwarn if issubclass(one.category, MonitoringWarning)]
    torch._dynamo.reset()


# --- as many sequences as each has tokens

N = 6
RAGGED = torch.arange(N) >= torch.tensor([6, 2, 4, 3, 5, 6])[:, None]
TRIANGLE = torch.ones(N, N, dtype=torch.bool).tril()


class WithAttnMask(ByHand):
    def forward(self, x, attn_mask=None):
        return self.attend(x, attn_mask)


def added(mask):
    return torch.zeros(mask.shape).masked_fill(~mask, -1e9)


@pytest.mark.parametrize("kind", [ByHand, WithAttnMask])
@pytest.mark.parametrize("form", [lambda mask: mask, added], ids=["boolean", "added to scores"])
@pytest.mark.parametrize("distance", [TRIANGLE, TRIANGLE & ~TRIANGLE.tril(-3)], ids=["causal", "sliding"])
def test_a_square_mask_of_distances_is_over_pairs_also_with_as_many_sequences_as_tokens(kind, form, distance):
    torch.manual_seed(0)
    model, x = nn.ModuleDict({"attn": kind(lambda mask: mask)}), torch.randn(N, N, 32)
    none = torch.zeros(N, N, dtype=torch.bool)
    require(model, lambda: model["attn"](x, form(distance)), {"attn": "attn.out_proj"}, {"attn": none})


@pytest.mark.parametrize("form", [lambda mask: mask, added], ids=["boolean", "added to scores"])
def test_an_ambiguous_square_mask_costs_one_warning(form, tmp_path):
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": ByHand(lambda mask: mask[:, None, None])})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "history.jsonl"
    heads = watch_heads(model, optimizer, every_n_steps=1, history=path, verbose=False)
    with pytest.warns(MonitoringWarning, match="of `attn` are absent: a mask can be read in two") as caught, heads:
        for _ in range(4):  # the first shows the layer, whose outputs are captured from the second on
            with heads.step():
                model["attn"](torch.randn(N, N, 32), form(~RAGGED)).sum().backward()
                optimizer.step()
    assert len(caught) == 1
    for record in read_records(path)[1:4]:
        assert not set(METRICS) & set(record.layers["attn"].values)
        assert "can be read in two ways" in record.absent["head outputs/attn"]


def test_a_square_attention_mask_is_over_tokens_by_its_name():
    torch.manual_seed(0)
    model, x = (
        nn.ModuleDict({"attn": WithAttentionMask(lambda mask: mask.bool()[:, None, None])}),
        torch.randn(N, N, 32),
    )
    require(model, lambda: model["attn"](x, (~RAGGED).long()), {"attn": "attn.out_proj"}, {"attn": RAGGED})


def test_the_causal_mask_of_torchs_encoder_is_not_taken_for_padding():
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(block, 1, enable_nested_tensor=False), torch.randn(N, N, 32)
    outputs = truth_of(model.layers[0].self_attn, x, x, x, attn_mask=~TRIANGLE)
    monitor, record = read(model, lambda: model(x, mask=~TRIANGLE))
    values = record.layers["layers.0.self_attn"].values
    truth = expected(outputs, monitor.layers[0], torch.zeros(N, N, dtype=torch.bool))
    assert {tag: values[tag] for tag in METRICS} == pytest.approx(truth, rel=1e-3, abs=1e-6)


def test_packed_sequences_have_no_padding():
    frame = Frame(nn.Identity(), {"x": torch.zeros(10, 4), "cu_seqlens": torch.tensor([0, 4, 10])})
    outer = Frame(nn.Identity(), {"attention_mask": torch.ones(2, 5)})
    assert find_padding((10,), [frame, outer]).padded is None


@pytest.mark.parametrize("wrong", ["left", 0.5, True, [0]])
def test_an_invalid_padding_argument_is_refused(wrong):
    with pytest.raises(MisconfigurationError, match="`padding` must be"):
        HeadDiversityMonitor(nn.ModuleDict({"attn": ByHand(None)}), padding=wrong)


@pytest.mark.parametrize("lead", [(2, 1), (2,)])
def test_a_mask_over_pairs_hides_the_keys_that_no_query_may_see(lead):
    may_see = torch.ones(*lead, 5, 5, dtype=torch.bool)
    may_see[1, ..., 4] = False
    hidden = _over_pairs(may_see, "attention", (2, 5))
    assert hidden is not None
    assert hidden.tolist() == 9 * [False] + [True]
