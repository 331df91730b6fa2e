"""What is captured of armed forwards, against eager attention of transformers, hooks, and closed forms; and bits."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hdi_callback.attention.capture.capture import Capture, Captured
from hdi_callback.attention.capture.reader import Reader
from hdi_callback.attention.discovery.find import survey, survey_tape
from hdi_callback.attention.first_calls import FirstCalls
from hdi_callback.attention.layer import AttentionLayer, HeadWeight, Site, Term, WeightRows
from tests.attention.models import Model, batches, is_equal, train
from tests.versions import needs_saved_tensors


@pytest.fixture(autouse=True)
def _nothing_compiled():
    yield
    torch._dynamo.reset()  # where something is compiled rows are not read


def rows_of(logits: Tensor, weights: Tensor, *, positions: Tensor, visible: Tensor) -> list[dict[str, Any]]:
    """What was handed over, layer by layer."""
    return [
        {
            "logits": logits[layer], "weights": weights[layer], "positions": positions, "visible": visible[layer],
        }
        for layer in range(len(logits))
    ]  # fmt: skip


def capture_of(model: nn.Module, layers, **options: Any) -> Capture:
    settings = {"max_tokens": 1000, "padding": "auto", "rows": rows_of, "max_rows": 1000} | options
    return Capture(model, layers, **settings)


def captured(model: nn.Module, run, layers=None, **options: Any) -> dict[str, Captured]:
    """Capture one forward; `run` is a function without arguments."""
    layers = survey(model, run).layers if layers is None else layers
    capture = capture_of(model, layers, **options)
    capture.arm()
    run()
    found = capture.take()
    capture.disarm()
    return found


def of_transformers(name: str, attention: str) -> nn.Module:
    import transformers as T

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 50,
    }  # fmt: skip
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "attn_implementation": attention}
    if name == "gpt2":
        config = T.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=64, **special)
        return T.GPT2LMHeadModel(config)
    if name == "llama":
        return T.LlamaForCausalLM(T.LlamaConfig(**sizes, num_key_value_heads=2, **special))
    if name == "bert":
        return T.BertForMaskedLM(T.BertConfig(**sizes, **special))
    if name == "gemma2":  # softcap, sliding windows
        return T.Gemma2ForCausalLM(
            T.Gemma2Config(**sizes, num_key_value_heads=2, head_dim=8, sliding_window=4, **special)
        )
    if name == "gpt_oss" and not hasattr(T, "GptOssForCausalLM"):
        pytest.skip(f"transformers {T.__version__} has no GPT-OSS")
    if name == "gpt_oss":  # sinks; the largest score is taken off before the softmax
        return T.GptOssForCausalLM(
            T.GptOssConfig(
                **sizes, num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1, **special
            )
        )
    config = T.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=50, decoder_start_token_id=0)
    config._attn_implementation = attention
    if attention == "sdpa" and not T.T5ForConditionalGeneration._supports_sdpa:
        pytest.skip(f"T5 of transformers {T.__version__} has no sdpa")
    return T.T5ForConditionalGeneration(config)


def batch_of(name: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids, mask = torch.randint(3, 50, (3, 11)), torch.ones(3, 11, dtype=torch.long)
    mask[1, 8:] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    return batch | ({"decoder_input_ids": torch.randint(3, 50, (3, 7))} if name == "t5" else {})


@pytest.mark.parametrize(
    ("name", "attention"),
    [("gpt2", "sdpa"), ("gpt2", "eager"), ("llama", "sdpa"), ("llama", "eager"), ("bert", "sdpa"), ("bert", "eager"),
     ("t5", "sdpa"), ("t5", "eager"), ("gemma2", "eager"), ("gpt_oss", "eager")],
)  # fmt: skip
def test_rows_and_outputs_are_those_of_eager_transformers(name, attention):
    model, batch = of_transformers(name, attention).eval(), batch_of(name)
    eager = of_transformers(name, "eager").eval()
    eager.load_state_dict(model.state_dict())
    with torch.no_grad():
        truth = eager(**batch, output_attentions=True)
    if name == "t5":
        maps = {
            **{f"encoder.block.{at}.layer.0.SelfAttention": one for at, one in enumerate(truth.encoder_attentions)},
            **{f"decoder.block.{at}.layer.0.SelfAttention": one for at, one in enumerate(truth.decoder_attentions)},
            **{f"decoder.block.{at}.layer.1.EncDecAttention": one for at, one in enumerate(truth.cross_attentions)},
        }
    else:
        maps = dict(enumerate(truth.attentions))
    layers = survey(model, lambda: model(**batch)).layers
    assert len(layers) == len(maps)
    inputs: dict[str, Tensor] = {}
    for layer in layers:
        layer.output_module.register_forward_pre_hook(
            lambda module, args, name=layer.name: inputs.update({name: args[0]})
        )
    found = captured(model, lambda: model(**batch), layers)
    for at, layer in enumerate(layers):
        one, weights = found[layer.name], maps[layer.name if name == "t5" else at]
        (rows,) = one.rows
        visible = rows["visible"].any(-1).expand(weights.shape[:3])
        # GPT-OSS has a sink beside the keys.
        assert torch.allclose(rows["weights"][visible][:, : weights.shape[-1]], weights[visible], atol=2e-6)
        assert torch.equal(one.outputs, inputs[layer.name].detach().view(-1, layer.num_heads, layer.value_dim))
        is_decoder = "decoder" in layer.name
        valid = torch.ones(21, dtype=torch.bool) if is_decoder else batch["attention_mask"].bool().flatten()
        assert torch.equal(valid if one.valid is None else one.valid, valid)
        assert visible.flatten(0).sum() == valid.sum() * layer.num_heads
        assert not one.reasons


def taken_of(capture: Capture, run) -> dict[str, Captured]:
    """Capture one forward with a capture that goes on."""
    capture.arm()
    run()
    return capture.take()


@needs_saved_tensors
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_rows_that_autograd_saved_are_those_that_the_mode_reads(name, monkeypatch):
    model, batch = of_transformers(name, "sdpa").eval(), batch_of(name)
    layers = survey(model, lambda: model(**batch)).layers
    capture, operations = capture_of(model, layers), []
    by_mode = Reader.__torch_dispatch__
    monkeypatch.setattr(Reader, "__torch_dispatch__", lambda *args: operations.append(0) or by_mode(*args))
    first = taken_of(capture, lambda: model(**batch))
    assert operations
    operations.clear()
    second = taken_of(capture, lambda: model(**batch))
    assert not operations
    assert {name: vars(one)["reasons"] for name, one in second.items()} == {layer.name: {} for layer in layers}
    for layer in layers:
        ((before,), (after,)) = first[layer.name].rows, second[layer.name].rows
        assert all(is_equal(before[key], after[key]) for key in before)
        assert torch.equal(first[layer.name].outputs, second[layer.name].outputs)
        assert is_equal(first[layer.name].valid, second[layer.name].valid)
    for _ in range(8):
        taken_of(capture, lambda: model(**batch))
    assert not operations
    taken_of(capture, lambda: model(**batch))
    assert operations  # what is shown is shown anew after some readings


@needs_saved_tensors
def test_saved_tensors_that_go_through_hooks_of_the_users_are_left_to_them_and_rows_are_read_by_the_mode_from_then_on():
    model, batch, unpacked = of_transformers("gpt2", "sdpa").eval(), batch_of("gpt2"), []
    capture = capture_of(model, survey(model, lambda: model(**batch)).layers)
    attention = model.transformer.h[0].attn
    first = taken_of(capture, lambda: model(**batch))

    def pack(tensor):
        return tensor

    def unpack(tensor):
        unpacked.append(0)
        return tensor

    for inner in (model, attention):

        def forward(*args, forward=inner.forward, **kwargs):
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                return forward(*args, **kwargs)

        inner.forward = forward
        second, third = (taken_of(capture, lambda: model(**batch)) for _ in range(2))
        assert not unpacked
        for name, one in first.items():
            assert torch.equal(one.outputs, second[name].outputs)
            assert torch.equal(one.rows[0]["weights"], third[name].rows[0]["weights"])
        absent = [name for name, one in second.items() if not one.rows]
        assert absent == (list(first) if inner is model else ["transformer.h.0.attn"])
        assert all("the next reading reads it anew" in second[name].reasons["rows"] for name in absent)
        del inner.forward
        taken_of(capture, lambda: model(**batch))  # shows once more what autograd saves


@needs_saved_tensors
def test_attention_that_is_no_longer_fused_is_absent_once_and_then_read_by_the_mode():
    class Switched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out, self.is_fused = nn.Linear(12, 36), nn.Linear(12, 12), True

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (one.unflatten(-1, (3, 4)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
            out = F.scaled_dot_product_attention(q, k, v) if self.is_fused else (q @ k.mT / 2).softmax(-1) @ v
            return self.out(out.transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    model, x = Switched(), torch.randn(2, 7, 12)
    capture = capture_of(model, survey(model, lambda: model(x)).layers)
    fused = [taken_of(capture, lambda: model(x))["the model"] for _ in range(2)]
    model.is_fused = False
    absent, written = [taken_of(capture, lambda: model(x))["the model"] for _ in range(2)]
    assert not absent.rows
    assert "the next reading reads it anew" in absent.reasons["rows"]
    assert not written.reasons
    for one in (fused[1], written):
        assert torch.allclose(one.rows[0]["weights"], fused[0].rows[0]["weights"], atol=1e-6)


def test_the_largest_scores_are_those_of_eager_attention():
    batch, found = batch_of("llama"), []
    for attention in ("sdpa", "eager"):
        model = of_transformers("llama", attention)
        rows = captured(model, lambda: model(**batch))["model.layers.0.self_attn"].rows[0]  # noqa: B023
        found.append(rows["logits"].masked_fill(~rows["visible"], -torch.inf).amax(-1))
    assert torch.allclose(*found, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"need_weights": False}], ids=["weights", "fused"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_torchs_attention_against_its_own_weights(options, batch_first):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 4, batch_first=batch_first)
    model, x = nn.ModuleDict({"a": module}), torch.randn(3, 6, 16)
    padded = torch.zeros(3, 6, dtype=torch.bool)
    padded[0, 4:] = True
    given = x if batch_first else x.transpose(0, 1)
    run = lambda: module(given, given, given, key_padding_mask=padded, **options)  # noqa: E731
    out, truth = module(given, given, given, key_padding_mask=padded, average_attn_weights=False)
    found = captured(model, run)["a"]
    rows = found.rows[0]
    visible = rows["visible"].any(-1).expand(3, 4, 6)
    assert torch.allclose(rows["weights"][visible], truth[visible], atol=1e-6)
    assert visible.sum() == 4 * (~padded).sum()
    joined = found.outputs.flatten(1) @ module.out_proj.weight.T + module.out_proj.bias
    expected = out if batch_first else out.transpose(0, 1)
    assert torch.allclose(joined.view(3, 6, 16), expected, atol=1e-6)
    assert torch.equal(found.valid.view(3, 6), ~padded)


def test_equal_keys_are_attended_uniformly():
    model, (x, _) = Model(), batches(1)[0]
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight[32:64] = 0
    found = captured(model, lambda: model(x), padding=None)["blocks.0.attention"].rows[0]
    entropy = torch.special.entr(found["weights"]).sum(-1)
    expected = torch.arange(1, 10).log()  # causal: query n sees n keys
    assert torch.allclose(entropy, expected.expand_as(entropy), atol=1e-5)
    assert torch.equal(found["visible"][0, 0], torch.ones(9, 9).tril().bool())
    assert torch.equal(found["positions"], torch.arange(9))


def test_samples_are_bounded_and_are_of_the_same_positions_at_each_step():
    model = Model()
    x = torch.randn(8, 50, 32)
    capture = capture_of(model, survey(model, lambda: model(x)).layers, max_tokens=40, max_rows=16, padding=None)
    positions = []
    for _ in range(2):
        capture.arm()
        model(x)
        model(x)
        for one in capture.take().values():
            assert 20 <= len(one.outputs) <= 40
            assert len(one.rows) == 2
            b, _, q, k = one.rows[0]["weights"].shape
            assert b * q <= 16
            assert k == 50
        positions.append(one.rows[0]["positions"].tolist())
    assert positions[0] == positions[1] == [6, 19, 32, 45]


def test_padding_takes_no_room_in_a_sample():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model()

        def forward(self, x, attention_mask):
            return self.inner(x)

    model, x = Masked(), torch.randn(4, 50, 32)
    mask = torch.zeros(4, 50, dtype=torch.long)
    mask[:, :10] = 1
    found = captured(model, lambda: model(x, mask), max_tokens=40)["inner.blocks.0.attention"]
    assert len(found.outputs) <= 40
    assert found.valid.all()
    few = captured(model, lambda: model(x, mask), max_tokens=100)["inner.blocks.0.attention"]
    assert few.valid.sum() == 40


def test_evaluation_is_not_counted_unless_asked_for():
    model, (x, _) = Model(), batches(1)[0]
    capture = capture_of(model, survey(model, lambda: model(x)).layers)
    capture.arm()
    with torch.no_grad():
        model(x)
    found = capture.take()["blocks.0.attention"]
    assert found.outputs is None
    assert found.rows == []
    assert "only forwards that train are captured" in found.reasons["outputs"]
    capture.arm(training_only=False)
    with torch.no_grad():
        model(x)
    found = capture.take()["blocks.0.attention"]
    assert len(found.outputs) == 18
    assert len(found.rows) == 1


def test_nothing_is_captured_while_it_is_not_armed_and_hooks_leave():
    model, (x, _) = Model(), batches(1)[0]
    before = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())
    capture = capture_of(model, survey(model, lambda: model(x)).layers)
    capture.arm()
    capture.disarm()
    model(x)
    reasons = capture.take()["blocks.0.attention"].reasons
    assert reasons == dict.fromkeys(("outputs", "rows"), "it was not called in a forward that was captured")
    capture.arm()
    capture.disarm()
    assert sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()) == before


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_checkpointing_runs_again_is_counted_once(reentrant):
    model, (x, _) = Model(reentrant=reentrant), batches(1)[0]
    layers = survey(model, lambda: model(x)).layers
    plain = Model()
    plain.load_state_dict(model.state_dict())
    capture = capture_of(model, layers, padding=None)
    capture.arm()
    for _ in range(2):
        model(x).sum().backward()
    found = capture.take()["blocks.0.attention"]
    assert len(found.outputs) == 36
    assert len(found.rows) == 2
    expected = captured(plain, lambda: plain(x), padding=None)["blocks.0.attention"]
    assert torch.equal(found.outputs[:18], expected.outputs)


def test_heads_in_another_order_and_heads_side_by_side_features():
    class Interleaved(nn.Module):  # feature i of head h is feature i * H + h of the output projection
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(12, 12)

        def forward(self, x):
            return self.out(x)

    module = Interleaved()
    features = torch.arange(12).view(4, 3).T
    weight = HeadWeight((Term((WeightRows(module, ("out.weight",), features, 12, 12),)),))
    key = HeadWeight((Term((WeightRows(module, ("out.weight",), torch.arange(12).view(3, 4) * 12, 12),)),))
    heads = {"key_of": (0, 1, 2), "value_of": (0, 1, 2), "value_dim": 4}
    layer = AttentionLayer("", module, {"key": key, "output": weight}, output_module=module.out, **heads)
    x = torch.randn(2, 5, 12)
    found = captured(module, lambda: module(x), [layer], padding=None)[""]
    assert torch.equal(found.outputs, x.view(10, 4, 3).mT)
    assert found.reasons["rows"] == "no softmax and no fused attention of it was recognised in a forward"


def test_a_layer_that_shares_its_output_projection_has_no_outputs():
    model, (x, _) = Model(), batches(1)[0]
    model.blocks[1].attention.out = model.blocks[0].attention.out
    for found in captured(model, lambda: model(x)).values():
        assert found.outputs is None
        assert found.reasons["outputs"] == "it shares its output projection with another layer"
        assert len(found.rows) == 1


def test_an_error_of_the_function_of_rows_ends_in_reasons_and_not_in_the_forward():
    def fail(*_, **__):
        raise ZeroDivisionError("rows")

    model, (x, _) = Model(), batches(1)[0]
    for found in captured(model, lambda: model(x), rows=fail).values():
        assert found.rows == []
        assert "ZeroDivisionError: rows" in found.reasons["rows"]
        assert found.outputs is not None


def test_a_plan_of_another_attention_ends_in_a_reason():
    model, (x, _) = Model(), batches(1)[0]
    (layer, _) = survey(model, lambda: model(x)).layers
    wrong = copy.copy(layer)
    object.__setattr__(wrong, "sites", (Site(layer.name, 0, "fused", 4, rows=("h", "bh", "q")),))
    found = captured(model, lambda: model(x), [wrong])[layer.name]
    assert "its rows of attention cannot be read" in found.reasons["rows"]


class Watch:
    """Captures steps 0 and 2, as a callback does."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.taken, self.capture = model, {}, None
        self.handle = FirstCalls(model, self.found, survey_tape)

    def found(self, survey, recording) -> None:
        self.capture = capture_of(self.model, survey.layers, max_tokens=12, max_rows=8, calls=self.handle)
        self.capture.arm()

    def before(self, step: int) -> None:
        if self.capture is not None:
            self.capture.arm() if step == 2 else self.capture.disarm()

    def after(self, step: int) -> None:
        if step in (0, 2):
            self.taken[step] = self.capture.take()


def watched(make, **options: Any) -> tuple[list[Any], Watch]:
    watches: list[Watch] = []
    kept = train(
        make,
        lambda model: watches.append(Watch(model)) or watches[0],
        before=lambda watch, step: watch.before(step),
        after=lambda watch, step: watch.after(step),
        **options,
    )
    return kept, watches[0]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.1, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 3)

    def forward(self, x):
        return self.head(self.encoder(x))


MAKES = {
    "fused": Model,
    "written out": lambda: Model(written=True),
    "reentrant": lambda: Model(reentrant=True),
    "not reentrant": lambda: Model(reentrant=False),
    "not reentrant, written out": lambda: Model(reentrant=False, written=True),
    "torch": Encoder,
}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", MAKES)
def test_training_stays_as_it_is_bit_by_bit(name, dtype):
    kept, watch = watched(MAKES[name], dtype=dtype)
    assert is_equal(kept, train(MAKES[name], dtype=dtype))
    for found in (one for taken in watch.taken.values() for one in taken.values()):
        assert not found.reasons
        assert len(found.outputs) <= 12
        assert len(found.rows) == 1
        assert not any(one.requires_grad for one in (found.outputs, found.rows[0]["weights"]))


def test_modules_have_hooks_only_while_a_step_is_captured():
    model, (x, _) = Model(), batches(1)[0]
    capture = capture_of(model, survey(model, lambda: model(x)).layers)

    def hooks() -> int:
        return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())

    assert hooks() == 0
    for _ in range(2):
        capture.arm()
        assert hooks() > 0
        model(x)
        assert all(one.outputs is not None for one in capture.take().values())
        assert hooks() == 0


def test_a_model_that_is_compiled_after_some_steps_is_captured_again():
    model, (x, _) = without_dropout(Model()), batches(1)[0]
    capture = capture_of(model, survey(model, lambda: model(x)).layers, rows=None)
    capture.arm()
    model(x)
    eager = capture.take()
    run = compiled(model)
    run(x)  # not captured, and the first call of the graph
    capture.arm()
    run(x)
    for name, found in capture.take().items():
        assert found.outputs is not None, found.reasons
        assert torch.allclose(found.outputs, eager[name].outputs, atol=1e-5)
    capture.disarm()


def compiled(model):
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def blocks(model):
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    return model


@pytest.mark.parametrize(
    ("make", "call"),
    [
        (Model, compiled),
        pytest.param(Model, blocks, marks=pytest.mark.slow),
        pytest.param(lambda: Model(reentrant=True), blocks, marks=pytest.mark.slow),
        pytest.param(lambda: Model(reentrant=False), blocks, marks=pytest.mark.slow),
    ],
    ids=["model", "blocks", "reentrant", "not reentrant"],
)
def test_compiled_graphs_are_those_of_an_unwatched_training_and_everything_is_captured(make, call):
    kept, graphs = [], []
    for run in (train, watched):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        kept.append(run(make, call=call, steps=5))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert not torch._dynamo.utils.counters["graph_break"]
    assert is_equal(kept[0], kept[1][0])
    assert graphs[1] == graphs[0]
    for found in (one for taken in kept[1][1].taken.values() for one in taken.values()):
        assert found.outputs.shape[1:] == (4, 8)
        assert found.rows
        assert not found.reasons


@pytest.mark.slow
def test_torchs_attention_in_compiled_graphs_gives_the_outputs_of_eager_ones():
    kept, graphs = [], []
    for run in (train, watched):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        kept.append(run(Encoder, call=compiled, steps=5))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert is_equal(kept[0], kept[1][0])
    assert graphs[1] == graphs[0]
    _, eager = watched(lambda: without_dropout(Encoder()), steps=5)
    torch._dynamo.reset()
    _, again = watched(lambda: without_dropout(Encoder()), steps=5, call=compiled)
    for name, found in again.taken[2].items():
        assert torch.allclose(found.outputs, eager.taken[2][name].outputs, atol=1e-5)
        for one, other in zip(found.rows, eager.taken[2][name].rows, strict=True):
            assert torch.allclose(one["weights"], other["weights"], atol=1e-5)
        assert not found.reasons


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, (nn.Dropout, nn.MultiheadAttention)):
            setattr(module, "p" if isinstance(module, nn.Dropout) else "dropout", 0.0)
    return model


def test_paused_hooks_leave_the_fast_path_of_evaluation_and_come_back_without_recompiling():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, (x, _) = Encoder(), batches(1)[0]
    capture = capture_of(model, survey(model, lambda: model(x)).layers)
    run = compiled(model)
    run(x)
    for _ in range(2):
        capture.pause()
        assert not any(module._forward_pre_hooks for module in model.modules())
        capture.go_on()
        run(x)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    capture.arm()
    run(x)
    assert len(capture.take()["encoder.layers.0.self_attn"].outputs) == 18


@pytest.mark.slow
def test_outputs_of_inductors_graphs_are_those_of_eager_ones():
    torch._dynamo.reset()
    kept, _ = watched(Model, call=torch.compile)
    torch._dynamo.reset()
    assert is_equal(kept, train(Model, call=torch.compile))
    torch._dynamo.reset()
    _, watch = watched(lambda: without_dropout(Model()), call=torch.compile)
    torch._dynamo.reset()
    _, eager = watched(lambda: without_dropout(Model()))
    for name, found in watch.taken[0].items():
        assert torch.allclose(found.outputs, eager.taken[0][name].outputs, atol=1e-5)


def test_a_model_that_may_not_be_compiled_again_is_captured():
    torch._dynamo.reset()
    model, (x, _) = Model(), batches(1)[0]
    capture = capture_of(model, survey(model, lambda: model(x)).layers)
    run = compiled(model)
    run(x)
    with torch.compiler.set_stance("fail_on_recompile"):
        capture.arm()
        run(x)
        found = capture.take()["blocks.0.attention"]
    assert found.outputs is not None
    assert found.rows


@pytest.mark.parametrize("call", [lambda model: model, compiled], ids=["eager", "compiled"])
def test_padding_is_that_of_each_batch(call):
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x, key_padding_mask):
            return self.inner(x, x, x, key_padding_mask=key_padding_mask, need_weights=False)[0]

    model, x = Masked(), torch.randn(2, 8, 16)
    none = torch.zeros(2, 8, dtype=torch.bool)
    capture, run = capture_of(model, survey(model, lambda: model(x, none)).layers), call(model)
    for real in (7, 3):
        capture.arm()
        run(x, (torch.arange(8) >= real).expand(2, 8))
        assert capture.take()["inner"].valid.sum() == 2 * real


class CountingOperations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_users_counts_what_the_model_does_alone():
    model, (x, _) = Model(), batches(1)[0]
    layers, counts = survey(model, lambda: model(x)).layers, []
    for is_armed in (False, True):
        capture = capture_of(model, layers)
        with CountingOperations() as mode:
            if is_armed:
                capture.arm()
            model(x)
            counts.append(mode.count)
        capture.disarm()
    assert counts[0] == counts[1]


def test_a_forward_that_raises_leaves_no_mode_behind():
    class Stops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.stops = Model(), False

        def forward(self, x):
            if self.stops:
                self.inner.blocks[0].attention.out.register_forward_hook(lambda *_: 1 / 0)
            return self.inner(x)

    model, (x, _) = Stops(), batches(1)[0]
    capture = capture_of(model, survey(model, lambda: model(x)).layers)
    capture.arm()
    model.stops = True
    with pytest.raises(ZeroDivisionError):
        model(x)
    assert torch._C._len_torch_dispatch_stack() == 0
    capture.take()
    capture.disarm()


def test_copies_and_saved_models_are_not_watched():
    model, (x, _) = Model(), batches(1)[0]
    capture = capture_of(model, survey(model, lambda: model(x)).layers)
    capture.arm()
    copy.deepcopy(model)(x)
    pickle.loads(pickle.dumps(model))(x)
    assert capture.take()["blocks.0.attention"].outputs is None


def test_convolutions_of_kernel_size_one_give_positions_as_tokens():
    class Pointwise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Conv2d(8, 24, 1), nn.Conv2d(8, 8, 1)

        def forward(self, x):
            q, k, v = self.qkv(x).flatten(2).unflatten(1, (3, 2, 4)).mT.unbind(1)
            return self.out(F.scaled_dot_product_attention(q, k, v).mT.reshape(x.shape))

    model, x, given = Pointwise(), torch.randn(2, 8, 3, 4), []
    model.out.register_forward_pre_hook(lambda module, args: given.append(args[0].detach()))
    found = captured(model, lambda: model(x), padding=None)["the model"]
    assert torch.equal(found.outputs, given[-1].flatten(2).mT.reshape(24, 2, 4))


def test_dropout_is_left_out_of_rows():
    model = of_transformers("gpt2", "eager").train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    batch = {"input_ids": batch_of("gpt2")["input_ids"]}
    found = captured(model, lambda: model(**batch))["transformer.h.0.attn"].rows[0]
    sums = found["weights"].sum(-1)
    assert torch.allclose(sums, torch.ones_like(sums), atol=1e-5)
    assert math.isclose(float(found["weights"][0, 0, 0, 0]), 1.0)


class Plain(Tensor):
    """As fastai's, MONAI's and torchvision's tensors are."""


def test_inputs_of_a_plain_subclass_of_tensor_lose_nothing():
    model, (x, _) = Model(), batches(1)[0]

    def run(given: Tensor) -> None:
        torch.manual_seed(0)  # dropout
        model(given)

    expected = captured(model, lambda: run(x), padding=None)
    found = captured(model, lambda: run(x.as_subclass(Plain)), padding=None)
    assert len(expected) == 2
    for name, one in expected.items():
        assert torch.equal(found[name].outputs.as_subclass(Tensor), one.outputs)
        assert len(found[name].rows) == len(one.rows) == 1
        assert found[name].reasons == one.reasons
