"""Every bug of the corpus is named, nothing is said of its twin, and cards say what is true by construction."""

from __future__ import annotations

import math
import sys
import warnings
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdi_callback import HDIWarning, HeadDiversityMonitor, check
from hdi_callback.attention import survey
from hdi_callback.attention.discovery.own_inputs import own_batches
from hdi_callback.checks.cards import joined_name
from hdi_callback.checks.facts import facts_of
from hdi_callback.testing import assert_heads
from tests.attention.by_hand import CASES
from tests.attention.by_hand_refused import REFUSED
from tests.checks.corpus import BUGS, VOCABULARY, Attention, B, Biased, D, Grouped, H, Model, Rotary, T, causal
from tests.studies.benchmarks.gpt import GPT

BY_NAME = {bug.name: bug for bug in BUGS}
TOKENS = torch.randint(VOCABULARY, (B, T), generator=torch.Generator().manual_seed(1))


class InOneMode(nn.Module):
    """Attention behind a batch norm of one sample, which training mode refuses, or with targets that it asks for."""

    def __init__(self, fails_in_training: bool):
        super().__init__()
        self.fails_in_training = fails_in_training
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        if self.training == self.fails_in_training:
            raise LookupError("targets are needed")
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("fails_in_training", [True, False])
def test_a_model_that_runs_in_one_mode_alone_is_read_in_it_and_the_other_is_named(fails_in_training):
    model = InOneMode(fails_in_training).train(not fails_in_training)
    result = checked(model, torch.randn(1, 4, 8))
    other = "training" if fails_in_training else "evaluation"
    assert (result.judged, result.findings) == (1, ())
    assert result.not_asked[f"{other} mode"] == "there the forward raises LookupError: targets are needed"
    assert ("gradients" in result.not_asked or "all" in result.not_asked) != fails_in_training
    assert model.training != fails_in_training


def checked(model, *batch):
    return check(model, lambda: model(*(batch or (TOKENS,))))


def card(kind):
    (found,) = checked(Model(kind).eval()).cards
    return found


# bugs


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_is_named_with_its_verdict(bug):
    found = checked(bug.build(), *bug.batch())
    assert (bug.finding, bug.verdict) in {(one.name, one.verdict) for one in found.findings}, str(found)
    layers = {one.layer for one in found.findings if one.name == bug.finding}
    assert all(one.startswith("blocks.2" if bug.alone else "blocks.0") for one in layers)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_nothing_is_said_of_the_right_twin(bug):
    assert checked(bug.build(twin=True), *bug.batch()).findings == ()


def by_features(weight):
    return weight.view(D // H, H, -1).transpose(0, 1).flatten(0, 1)


def by_groups(weight):
    return weight.unflatten(0, (H, -1))[[0, 2, 1, 3]].flatten(0, 1)


# What makes the weights of a bug those of its twin.
REORDERED = {
    "keys interleaved, queries not": {"k_proj": by_features},
    "values interleaved, keys not": {"v_proj": by_features},
    "key heads tiled": {"q_proj": by_groups, "out_proj": lambda weight: by_groups(weight.T).T},
    "LoRA split wrongly": {"b": lambda weight: weight.view(D // H, H, 2, -1).permute(2, 1, 0, 3).flatten(0, 2)},
}


@pytest.mark.parametrize("name", REORDERED)
def test_what_learns_as_well_is_odd_as_it_is_its_twin_with_rows_in_another_order(name):
    model, twin = BY_NAME[name].build(), BY_NAME[name].build(twin=True)
    assert BY_NAME[name].verdict == "odd"
    assert not torch.allclose(model(TOKENS), twin(TOKENS), atol=1e-5)
    with torch.no_grad():
        for block in twin.blocks:
            for projection, reordered in REORDERED[name].items():
                weight = getattr(block.attn, projection).weight
                weight.copy_(reordered(weight).clone())
    assert torch.allclose(model(TOKENS), twin(TOKENS), atol=1e-5)


@pytest.mark.parametrize(("diagonal", "verdict"), [(-1, "odd"), (0, "wrong")])
def test_an_inverted_mask_may_be_meant_only_if_each_token_sees_itself(diagonal, verdict):
    class Inverted(Attention):
        def mask(self, scores, padding):
            return scores.masked_fill(causal(scores, diagonal), -math.inf)

    (found,) = checked(Model(Inverted).eval()).findings
    assert (found.name, found.verdict) == ("mask", verdict)


# Behind their attention tokens lie elsewhere, whatever it sees.
MOVED = {"merge", "samples"}


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.finding not in MOVED], ids=lambda bug: bug.name)
@pytest.mark.parametrize("twin", [False, True], ids=["bug", "twin"])
def test_a_causal_card_means_that_no_later_token_changes_an_earlier_one(bug, twin):
    model, (tokens, padding) = bug.build(twin=twin), bug.batch()
    others = tokens.clone()
    others[:, -1] = (others[:, -1] + 1) % VOCABULARY
    torch.manual_seed(0)
    before = model(tokens, padding)
    torch.manual_seed(0)
    earlier = (before - model(others, padding))[:, :-1]
    states = {one.is_causal for one in checked(model, tokens, padding).cards if one.heads}
    if states == {True}:
        assert not earlier.any()
    elif states == {False} and padding is None:
        assert earlier.any()


def test_a_head_that_is_cut_off_gets_no_gradient():
    model = BY_NAME["a head is cut off"].build()
    model(TOKENS).sum().backward()
    rows = model.blocks[0].attn.v_proj.weight.grad.unflatten(0, (H, -1))
    assert not rows[3].any()
    assert rows[2].any()
    assert "rows 24-31 of v_proj of blocks.*.attn get exactly no gradient" in str(checked(model)).replace(
        "q_proj, rows 24-31 of ", ""
    )


def test_evidence_names_the_map_the_tokens_and_the_line():
    (found,) = checked(BY_NAME["keys split without transpose"].build()).findings
    assert "the output of k_proj is viewed as (batch, heads, tokens, width)" in found.text
    assert "tokens 0, 0, 0, 0, 1, 1" in found.text  # head 0 of 6 rows: 4 heads of token 0, 2 of token 1
    assert found.line.startswith("corpus.py:")
    assert str(found).startswith("WRONG  blocks.0-1.attn: ")


# cards


def test_the_card_of_a_plain_attention():
    assert str(card(Attention)).splitlines() == [
        "blocks.0.attn           4 heads of width 8 on 32, keys shared by none",
        "  queries, keys, values rows of q_proj, k_proj, v_proj, head by head",
        "  positions             none in the attention",
        "  scores                scaled by 0.3536 = 1/sqrt(8); causal",
        "  softmax               over keys",
        "  output                columns 0-31 of out_proj, head by head",
        "  block                 x + attention(norm(x))",
    ]


class Around(Model):
    """Blocks around attention and a feed-forward part, of which `write` says what they compute."""

    def __init__(self, write):
        super().__init__(Attention, Attention)
        self.write = write
        for block in self.blocks:
            block["mlp"] = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))
            block["second"] = nn.LayerNorm(D)

    def forward(self, tokens, padding=None):
        x = self.embed(tokens)
        for block in self.blocks:
            x = self.write(x, block["norm"], block["attn"], block["second"], block["mlp"])
        return self.head(x)


def rms(x):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


@pytest.mark.parametrize(
    ("write", "text"),
    [
        (lambda x, n, a, m, f: (y := x + a(n(x))) + f(m(y)), "x + attention(norm(x))"),
        (lambda x, n, a, m, f: (y := x.clone() + F.dropout(a(rms(x)), 0.1)) + f(rms(y)), "x + attention(norm(x))"),
        (lambda x, n, a, m, f: m((y := n(x + a(x))) + f(y)), "norm(x + attention(x))"),
        (lambda x, n, a, m, f: (y := x + n(a(x))) + m(f(y)), "x + norm(attention(x))"),
        (lambda x, n, a, m, f: (y := x + n(a(n(x)))) + m(f(y)), "x + norm(attention(norm(x)))"),
        (lambda x, n, a, m, f: x + a(n(x)) + f(n(x)), "x + attention(norm(x))"),
        (lambda x, n, a, m, f: f(n(x)) + a(n(x)) + x, "x + attention(norm(x))"),
        (lambda x, n, a, m, f: (y := m.weight * x + a(n(x))) + f(m(y)), "x + attention(norm(x))"),
        (lambda x, n, a, m, f: m((y := n(2 * x + a(x))) + f(y)), "norm(x + attention(x))"),
        (lambda x, n, a, m, f: (y := a(n(x))) + f(m(y)), "attention(x), and its input is not added"),
        (lambda x, n, a, m, f: (y := x + m(f(a(n(x))))) + f(m(y)), None),  # around more than the attention
    ],
)
def test_cards_say_what_is_around_an_attention(write, text):
    model = Around(write)
    tokens = torch.arange(T)[None].expand(B, T)
    lines = {each.layer: each.lines.get("block") for each in check(model, lambda: model(tokens)).cards}
    assert set(lines.values()) == {text}


def test_the_batch_that_is_made_up_for_a_folder_is_asked_what_is_asked_of_tokens():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=4, vocab_size=100, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).eval()
    for batch in own_batches(model):
        text = str(check(model, partial(model, **batch)))
        assert "Not asked: source" in text
        assert not [name for name in ("samples", "later tokens", "token before") if f"Not asked: {name}" in text]


class SideBySide(nn.Module):
    """Two attentions on features that no map has made."""

    def __init__(self, write):
        super().__init__()
        self.first, self.second, self.gain = Attention(), Attention(), nn.Parameter(torch.full((D,), 0.5))
        self.write = write

    def forward(self, x):
        return self.write(x, self.first, self.second, self.gain)


@pytest.mark.parametrize(
    "write",
    [
        lambda x, a, b, g: x + a(x) + b(x),
        lambda x, a, b, g: x - a(x) - b(x),
        lambda x, a, b, g: torch.addcmul(torch.addcmul(x, g, a(x)), g, b(x)),
        lambda x, a, b, g: torch.lerp(torch.lerp(x, a(x), g), b(x), g),
        lambda x, a, b, g: torch.stack([x, a(x), b(x)]).mean(0),
        lambda x, a, b, g: x * torch.sigmoid(a(x)) * torch.sigmoid(b(x)),
    ],
)
def test_no_attention_is_said_to_lose_an_input_that_what_it_is_joined_with_holds(write):
    model, x = SideBySide(write), torch.randn(B, T, D)
    checked_model = check(model, lambda: model(x))
    assert checked_model.cards
    assert not [str(finding) for finding in checked_model.findings if "takes the place" in finding.text]
    assert {each.lines.get("block") for each in checked_model.cards} <= {None, "x + attention(x)"}


def test_cards_say_which_keys_are_shared_and_what_is_rotated():
    assert card(Grouped).key_heads == 2
    assert "keys shared by 2 heads each" in str(card(Grouped))
    assert card(Rotary).lines["positions"] == "rotary on 8 of 8 features of queries and keys, pairs (i, i+4)"
    assert card(Biased).lines["positions"] == "a learned bias on the scores"


@pytest.mark.parametrize("is_fused", [False, True])
def test_scale_masks_and_dropout_are_read_alike_from_written_and_fused_attention(is_fused):
    class Own(Attention):
        def forward(self, x, padding=None):
            q, k, v = self.project(x)
            p = 0.25 if self.training else 0.0
            if is_fused:
                out = F.scaled_dot_product_attention(2 * q, k, v, is_causal=True, scale=0.1, dropout_p=p)
            else:
                hidden = torch.full((T, T), -math.inf).triu(1)
                out = F.dropout((2 * q @ k.mT * 0.1 + hidden).softmax(-1), p, self.training) @ v
            return self.out_proj(self.merge(out))

    (found,) = checked(Model(Own).train()).cards
    assert found.lines["scores"] == "scaled by 0.2; causal"
    assert found.lines["softmax"] == "over keys; dropout 0.25 behind it"
    assert found.is_causal


def test_what_is_not_known_is_said_and_no_finding():
    class Learned(Attention):
        def __init__(self):
            super().__init__()
            self.temperature = nn.Parameter(torch.ones(()))

        def score(self, q, k):
            return q @ k.mT * self.temperature

        def mask(self, scores, padding):
            return scores + (scores.detach() > 0) * -1e9  # depends on the data

    found = checked(Model(Learned).eval())
    assert found.cards[0].lines["scores"] == "scale not known; mask not known"
    assert found.findings == ()


def test_a_mask_is_not_known_where_scores_lie_in_another_order():
    class HeadsBehindQueries(Attention):
        def forward(self, x, padding=None):
            q, k, v = self.project(x)
            scores = torch.einsum("bhqd,bhkd->bqhk", q, k) / math.sqrt(self.d)
            scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1)[:, None], -math.inf)
            return self.out_proj(torch.einsum("bqhk,bhkd->bqhd", scores.softmax(-1), v).flatten(2))

    found = checked(Model(HeadsBehindQueries).eval())
    assert found.cards[0].heads == H
    assert found.cards[0].lines["scores"] == "scaled by 0.3536 = 1/sqrt(8); mask not known"
    assert found.findings == ()


def test_a_mask_is_read_from_the_first_tokens_of_a_long_sequence():
    model = Model(BY_NAME["mask shows the next token"].kind).eval()
    found = checked(model, torch.randint(VOCABULARY, (1, 150)))
    assert [one.name for one in found.findings] == ["mask"]


def test_a_model_without_attention_has_no_card():
    found = check(nn.Linear(4, 4), lambda: None)
    assert (found.cards, found.findings) == ((), ())


def test_a_forward_leaves_the_model_as_it_was():
    model = Model(Attention).train()
    model.blocks[0].eval()
    with torch.no_grad():  # what the question of gradients writes: zeros, and rows that get none
        model.blocks[0].attn.out_proj.weight.zero_()
        model.blocks[0].attn.q_proj.weight[:4] = 1e4
    state, random = {name: one.clone() for name, one in model.state_dict().items()}, torch.get_rng_state()
    modes = [module.training for module in model.modules()]
    assert "gradients" not in checked(model).not_asked
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(one, state[name]) for name, one in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())


def test_names_of_equal_layers_are_joined():
    assert joined_name(["a.0.x", "a.1.x", "a.3.x", "b.0.x"]) == "a.0-1,3.x, b.0.x"
    assert joined_name([""]) == "the model"


# models of others, with which nothing is wrong

IDS = torch.arange(16).view(2, 8)
PADDED = torch.tensor([[1] * 8, [1] * 6 + [0] * 2])
TINY = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def of_transformers(name, implementation):
    transformers = pytest.importorskip("transformers")
    how = {"attn_implementation": implementation}
    if name == "bert":
        return transformers.BertModel(transformers.BertConfig(**TINY, **how)), {"attention_mask": PADDED}
    if name == "llama":
        config = transformers.LlamaConfig(**TINY, num_key_value_heads=2, **how)
        return transformers.LlamaForCausalLM(config), {"attention_mask": PADDED}
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, **how)
        return transformers.GPT2LMHeadModel(config), {}
    if implementation == "sdpa" and not transformers.T5ForConditionalGeneration._supports_sdpa:
        pytest.skip(f"T5 of transformers {transformers.__version__} has no sdpa")
    config = transformers.T5Config(vocab_size=50, d_model=32, d_kv=8, num_layers=2, num_heads=4, d_ff=64, **how)
    return transformers.T5ForConditionalGeneration(config), {"attention_mask": PADDED, "decoder_input_ids": IDS.flip(1)}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5"])
def test_nothing_is_wrong_with_models_of_transformers(name, implementation):
    model, inputs = of_transformers(name, implementation)
    found = check(model.eval(), lambda: model(input_ids=IDS, **inputs))
    assert found.wrong == ()
    assert all(card.heads == 4 for card in found.cards)
    scores = [card.lines["scores"] for card in found.cards]
    assert (
        scores
        == {
            "bert": ["scaled by 0.3536 = 1/sqrt(8); padding masked"],
            "gpt2": ["scaled by 0.3536 = 1/sqrt(8); causal"],
            "llama": ["scaled by 0.3536 = 1/sqrt(8); causal; padding masked"],
            "t5": ["not scaled; padding masked", "not scaled; causal", "not scaled; padding masked"],
        }[name]
    )


@pytest.mark.parametrize("name", [*CASES, *REFUSED])
def test_of_attention_by_hand_only_what_is_a_bug_is_wrong(name):
    module, _, inputs = (CASES[name] if name in CASES else REFUSED[name][0])()
    found = check(module.eval(), lambda: module(*inputs))
    wrong = {
        "split_without_a_transpose": {"split"},
        "softmax_over_heads": {"softmax"},
        "a_relu_over_its_sum_over_heads": {"softmax"},
        "softmax_over_queries": {"softmax"},
        "a_relu_over_its_sum_over_queries": {"softmax"},
        "low_rank_updates": {"same twice"},  # its dropout runs in evaluation
        "two_values_of_one_parameter": {"gradients"},  # which are added up, so that one would do
    }
    assert {one.name for one in found.wrong} == wrong.get(name, set())
    assert "could not be collected" not in str(found)


def test_nothing_is_wrong_with_attention_of_torch():
    x = torch.randn(2, T, 32)
    padding = torch.zeros(2, T, dtype=torch.bool)
    padding[1, 4:] = True
    model = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)
    mask = model.generate_square_subsequent_mask(T)
    found = check(model, lambda: model(x, x, tgt_mask=mask, src_key_padding_mask=padding))
    assert found.findings == ()
    assert {one.layer: one.is_causal for one in found.cards if "multihead" not in one.layer} == {
        "encoder.layers.0-1.self_attn": False,
        "decoder.layers.0-1.self_attn": True,
    }


# in tests of others, and before a training


def test_assert_heads_passes_and_returns_what_was_found():
    model = Model(Grouped).eval()
    found = assert_heads(model, lambda: model(TOKENS), heads=4, key_heads=2, causal=True)
    assert len(found.cards) == 1


@pytest.mark.parametrize(
    ("kind", "expected", "message"),
    [
        (Attention, {"heads": 12}, "heads of blocks.0.attn is 4, and not 12"),
        (Attention, {"key_heads": 2}, "key_heads of blocks.0.attn is 4, and not 2"),
        (Attention, {"causal": False}, "is_causal of blocks.0.attn is True, and not False"),
        (Biased, {"causal": True}, "is_causal of blocks.0.attn is False, and not True"),
        (Attention, {"layers": "encoder.*"}, "no attention ran in a layer like 'encoder.*'"),
        (BY_NAME["mask shows the next token"].kind, {}, "WRONG  blocks.0.attn: each token attends to the next one"),
        (BY_NAME["split without transpose"].kind, {"heads": 4}, "the heads of blocks.0.attn are not known"),
    ],
)
def test_assert_heads_fails_with_the_reason_and_the_card(kind, expected, message):
    model = Model(kind).eval()
    with pytest.raises(AssertionError) as raised:
        assert_heads(model, lambda: model(TOKENS), **expected)
    assert message in str(raised.value)
    assert "blocks.0.attn           " in str(raised.value)


def test_a_monitor_warns_once_of_what_is_wrong_and_odd():
    model = BY_NAME["no scale"].build()
    with warnings.catch_warnings(record=True) as caught, HeadDiversityMonitor(model):
        warnings.simplefilter("always")
        for _ in range(3):
            model(TOKENS)
    (one,) = [one for one in caught if issubclass(one.category, HDIWarning)]
    assert "1/sqrt(8) is 0.3536: they are not scaled" in str(one.message)


def test_a_monitor_says_nothing_of_layers_that_are_left_out_or_of_what_is_right():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for model, exclude in ((BY_NAME["no scale"].build(), ["*"]), (Model(Attention), None)):
            with HeadDiversityMonitor(model, exclude=exclude):
                model(TOKENS)
    assert not [one for one in caught if issubclass(one.category, HDIWarning)]


class OfPackage(nn.Module):
    """Attention by a kernel of a package."""

    def __init__(self, kernel) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (projection(x).unflatten(-1, (4, 8)) for projection in (self.q, self.k, self.v))
        return self.o(self.kernel(q, k, v)[0].flatten(2))


@pytest.fixture(scope="module")
def kernel():
    """One that is named as those of FlashAttention 3, with some of its arguments."""

    def run(q: Tensor, k: Tensor, v: Tensor, softmax_scale=None, causal=False, window_size_left=-1, factor=None):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scores = q @ k.mT * (factor or softmax_scale or q.shape[-1] ** -0.5)
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1) if causal else torch.zeros(1, 1).bool()
        out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        return out.transpose(1, 2).contiguous(), q.sum(-1)

    library = torch.library.Library("flash_attn_3", "DEF")
    library.define(
        "fwd(Tensor q, Tensor k, Tensor v, float? softmax_scale=None, bool causal=False, int window_size_left=-1) -> "
        "(Tensor, Tensor)"
    )
    library.impl("fwd", run, "CompositeExplicitAutograd")
    other = torch.library.Library("flash_attn", "FRAGMENT")
    other.define(
        "_flash_attn_forward.other(Tensor q, Tensor k, Tensor v, float factor, bool lower) -> (Tensor, Tensor)"
    )
    other.impl(
        "_flash_attn_forward.other",
        lambda q, k, v, factor, lower: run(q, k, v, None, lower, factor=factor),
        "CompositeExplicitAutograd",
    )
    yield torch.ops.flash_attn_3.fwd, torch.ops.flash_attn._flash_attn_forward.other
    library._destroy()
    other._destroy()


def test_scale_and_masks_of_a_packages_kernel_are_read_by_its_arguments_and_not_known_otherwise(kernel) -> None:
    fwd, other = kernel
    x = torch.randn(2, 6, 32)

    def facts(call):
        module = OfPackage(call)
        collected = []
        survey(module, lambda: module(x), lambda reader: collected.extend(facts_of(reader)))
        (each,) = collected
        return each.scale, each.is_causal

    assert facts(fwd) == (pytest.approx(8**-0.5), False)
    assert facts(lambda *qkv: fwd(*qkv, softmax_scale=0.125, causal=True)) == (0.125, True)
    assert facts(lambda *qkv: fwd(*qkv, causal=True, window_size_left=3))[1] is None
    assert facts(lambda *qkv: other(*qkv, 0.125, True)) == (None, None)


def calls_a_layer(depth):
    model, tokens, readers, calls = GPT(depth, 8, 2, 4), torch.arange(4)[None], [], []
    survey(model, lambda: model(tokens), readers.append)
    sys.setprofile(lambda *event: calls.append(event[1]))
    try:
        facts = facts_of(readers[0])
    finally:
        sys.setprofile(None)
    assert {each.block for each in facts} == {"x + attention(norm(x))"}
    return len(calls) / depth


def test_a_layer_takes_as_much_in_a_deep_model_as_in_a_shallow_one():
    assert calls_a_layer(24) < 1.1 * calls_a_layer(3)
