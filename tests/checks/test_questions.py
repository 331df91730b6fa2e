"""Questions tell what is broken whatever the code, accuse no right twin, cost little, and leave nothing behind."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint

from hdi_callback import HDIWarning, HeadDiversityMonitor, check
from hdi_callback.attention.discovery.find import survey
from hdi_callback.checks import facts_of
from hdi_callback.testing import assert_heads
from tests.checks.corpus import VOCABULARY, Attention, B, Full, MaskSeesNext, Model, T, causal
from tests.checks.untried import REPORTS, Decoder
from tests.checks.untried_eighth import EIGHTH
from tests.checks.untried_fifth import FIFTH
from tests.checks.untried_fourth import FOURTH
from tests.checks.untried_later import LATER, CrossAttention, GroupedByBroadcast, Pair
from tests.checks.untried_seventh import SEVENTH
from tests.checks.untried_sixth import SIXTH
from tests.checks.untried_third import THIRD

NOT_TOLD = {
    "JingyunLiang/SwinIR 153",
    "strutive07/transformer-tensorflow2.0 14",
    "Howuhh/faster-trajectory-transformer 3",
    "PKU-YuanGroup/Open-Sora-Plan 171",
    "zhouhaoyi/Informer2020 97",
    "Lightning-AI/pytorch-lightning 19138",
    "zomux/lanmt 11",
    "huggingface/transformers 4499",
    "Lightning-AI/litgpt 891",
    "huggingface/peft 3774",
    "allenai/OLMo 222",
    "ndif-team/nnsight 673",
    "mosaicml/llm-foundry 372",
    "nntrainer/nntrainer 3982",
    "ZhengkunTian/OpenTransformer 25",
    "dmlc/dgl 3267",
    "snap-stanford/pretrain-gnns 49",
    "pyg-team/pytorch_geometric 1642",
    "pytorch/executorch 2010",
    "SamLynnEvans/Transformer 25",
    "lucidrains/x-transformers 103",
    "soobinseo/Transformer-TTS 11",
    "taki0112/Self-Attention-GAN-Tensorflow 3",
    "COMP6248-Reproducability-Challenge/music-transformer-comp6248 4",
    "NVIDIA-NeMo/Speech 3314",
    "gjylt/DoubleAttentionNet 3",
    "zju3dv/LoFTR 176",
    "282857341/nnFormer 88",
    "zsyOAOA/ResShift 81",
    "huggingface/diffusers 4568",
    "NVIDIA-NeMo/Speech 4350",
    "fla-org/flash-linear-attention 594",
    "TransformerLensOrg/TransformerLens 777",
    "vllm-project/vllm-omni 3828",
    "lablup/mlxcel 1600",
    "ByChelsea/CMOS 4",
    "paiml/aprender 2143",
    "unslothai/unsloth 8253",
}
ODD_TWINS = {"taki0112/Self-Attention-GAN-Tensorflow 3", "heykeetae/Self-Attention-GAN 11"}  # unscaled, as in the paper
EVERY = (*REPORTS, *LATER, *THIRD, *FOURTH, *FIFTH, *SIXTH, *SEVENTH, *EIGHTH)
TOKENS = torch.randint(VOCABULARY, (B + 1, T), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def forwards():
    """Which modules run, in a list that a check cannot reach, and so cannot put back."""
    modules = []
    handle = register_module_forward_pre_hook(lambda module, _: modules.append(module))
    yield modules
    handle.remove()


def first_tensor(output):
    return output[0] if isinstance(output, tuple) else output


def checked(report, is_twin=False):
    model, inputs = report.build(is_twin), report.inputs()
    return check(model, lambda: model(**inputs))


@pytest.mark.parametrize("report", EVERY, ids=lambda report: report.source)
def test_what_a_report_describes_is_told_and_nothing_of_its_right_twin(report):
    assert bool(checked(report).findings) is (report.source not in NOT_TOLD)
    of_twin = [(finding.verdict, finding.name) for finding in checked(report, is_twin=True).findings]
    assert of_twin == ([("odd", "scale")] if report.source in ODD_TWINS else [])


@pytest.mark.parametrize("report", EVERY, ids=lambda report: report.source)
def test_a_report_computes_something_else_than_its_twin(report):
    wrong, right = report.build(), report.build(is_twin=True)
    results = []
    for model in (wrong, right):
        with torch.no_grad():
            output = first_tensor(model(**report.inputs()))
            torch.manual_seed(0)
            trained = first_tensor(model.train()(**report.inputs()))
            results.append((output, trained, len(list(model.parameters()))))
    assert bool(results[1][0].isfinite().all())
    # Dropout in the wrong place shows in training alone, and what is not registered in what trains.
    is_equal = [torch.allclose(first, second, atol=1e-5) for first, second in zip(results[0][:2], results[1][:2])]
    assert not all(is_equal) or results[0][2] != results[1][2]


@pytest.mark.parametrize(
    ("reports", "rate"),
    [
        (REPORTS, (5, 14)),
        (LATER, (4, 14)),
        (THIRD, (8, 19)),
        (FOURTH, (4, 17)),
        (FIFTH, (7, 20)),
        (SIXTH, (3, 8)),
        (SEVENTH, (5, 20)),
        (EIGHTH, (4, 8)),
    ],
)
def test_first_results_are_those_that_the_page_names(reports, rate):
    assert (sum(report.first for report in reports), len(reports)) == rate


def test_a_model_of_twelve_layers_is_checked_in_under_twenty_forwards(forwards):
    model = Model(*[Attention] * 12).eval()
    check(model, lambda: model(TOKENS))
    assert 5 < forwards.count(model) < 20


def test_questions_leave_parameters_gradients_modes_and_random_states_as_they_were():
    model = Decoder(Attention).train()
    model.blocks[0]["attn"].drop.eval()
    nn.init.zeros_(model.blocks[0]["attn"].out_proj.weight)  # filled for a while
    model(TOKENS).sum().backward()
    before = [(value.clone(), value.grad.clone()) for value in model.parameters()]
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    assert check(model, lambda: model(TOKENS)).cards
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    for value, (weight, grad) in zip(model.parameters(), before):
        assert torch.equal(value, weight)
        assert torch.equal(value.grad, grad)


def test_no_hook_of_an_optimizer_runs_in_a_backward_of_a_question(tmp_path):
    model = Decoder(Attention)
    for value in model.parameters():
        value.register_post_accumulate_grad_hook(lambda _: (tmp_path / "stepped").touch())
    assert "gradients" not in check(model, lambda: model(TOKENS)).not_asked
    assert not (tmp_path / "stepped").exists()
    model(TOKENS).sum().backward()
    assert (tmp_path / "stepped").exists()


def test_a_check_ends_with_how_many_layers_were_judged_and_what_was_not_asked():
    model = Decoder(Attention).eval()
    text = str(check(model, lambda: model(TOKENS)))
    assert "2 of 2 layers were judged." in text
    assert "Not asked: padding (no padding of tokens in this batch)." in text


def test_tokens_without_an_order_are_wrong():
    model = Decoder(Full, is_positioned=False).eval()
    (finding,) = check(model, lambda: model(TOKENS)).findings
    assert (finding.verdict, finding.name) == ("wrong", "order")


def test_adapters_of_which_both_matrices_are_zero_are_wrong_and_with_one_they_are_right():
    class Adapted(Attention):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(self.width, 4, bias=False), nn.Linear(4, self.width, bias=False)
            nn.init.zeros_(self.b.weight)
            self.q_proj.weight.requires_grad_(False)

        def project(self, x):
            _, k, v = super().project(x)
            return self.split(self.q_proj(x) + self.b(self.a(x)), self.heads), k, v

    model = Decoder(Adapted).eval()
    assert not [each for each in check(model, lambda: model(TOKENS)).findings if each.name == "gradients"]
    for block in model.blocks:
        nn.init.zeros_(block["attn"].a.weight)
    (finding,) = [each for each in check(model, lambda: model(TOKENS)).findings if each.name == "gradients"]
    assert "zero" in finding.text


class Checkpointed(Decoder):
    """Blocks run under reentrant checkpointing, of inputs that need a gradient or not."""

    needs_gradient = False

    def forward(self, tokens):
        x = self.embed(tokens).detach().requires_grad_(self.needs_gradient)
        for block in self.blocks:
            run = lambda x, block=block: x + block["attn"](block["norm"](x))  # noqa: E731
            x = checkpoint(run, x, use_reentrant=True) if self.training else run(x)
        return self.head(x)


class CheckpointedRight(Checkpointed):
    needs_gradient = True


def test_reentrant_checkpointing_that_cuts_the_graph_is_wrong_in_training_mode_alone():
    cut, whole = Checkpointed(Attention), CheckpointedRight(Attention)
    (finding,) = check(cut, lambda: cut(TOKENS)).findings
    assert finding.verdict == "wrong"
    assert "in training mode" in finding.text
    assert "use_reentrant=False" in finding.text
    assert check(whole, lambda: whole(TOKENS)).findings == ()


@pytest.mark.parametrize("is_training", [False, True])
def test_both_modes_are_read_whatever_mode_the_model_is_in(is_training):
    class DropsScores(Attention):
        def weigh(self, scores):
            return self.drop(scores).softmax(-1)

    model = Decoder(DropsScores).train(is_training)
    (finding,) = check(model, lambda: model(TOKENS)).findings
    assert (finding.verdict, finding.name) == ("odd", "dropout")
    assert "before the softmax" in finding.text
    assert model.training is is_training


@pytest.mark.parametrize(("sign", "is_subtracted"), [(1, False), (-1, False), (1, True), (-1, True)])
def test_a_bias_that_prefers_far_tokens_is_wrong_whether_it_is_added_or_subtracted(sign, is_subtracted):
    class Sloped(Attention):
        def mask(self, scores, padding):
            at = torch.arange(scores.shape[-1])
            bias = sign * 0.5 * (at[:, None] - at)
            return super().mask(scores - bias if is_subtracted else scores + bias, padding)

    model = Decoder(Sloped).eval()
    names = [each.name for each in check(model, lambda: model(TOKENS)).findings]
    assert names == (["distance"] if (sign > 0) is not is_subtracted else [])


def test_rotary_tables_that_scale_are_odd_unless_a_module_declares_it():
    class Longer(Attention):
        def place(self, q, k, v):
            return self.turned(q), self.turned(k), v

        def turned(self, x):
            half = x.shape[-1] // 2
            angles = torch.arange(x.shape[-2])[:, None] * 100 ** (-torch.arange(half) / half)
            angles = torch.cat([angles, angles], -1)
            return x * (1.2 * angles.cos()) + torch.cat([-x[..., half:], x[..., :half]], -1) * (1.2 * angles.sin())

    model = Decoder(Longer).eval()
    (finding,) = check(model, lambda: model(TOKENS)).findings
    assert (finding.verdict, finding.name) == ("odd", "rotation")
    assert "1.2 times as long" in finding.text
    model.attention_scaling = 1.2
    assert check(model, lambda: model(TOKENS)).findings == ()


class OfLengths(Decoder):
    """Documents in a row, of which the lengths are given."""

    hides = True

    def forward(self, tokens, cu_seqlens=None):
        number = torch.bucketize(torch.arange(tokens.shape[1]), cu_seqlens, right=True)
        for block in self.blocks:
            block["attn"].apart = number[:, None] != number if self.hides else torch.zeros((), dtype=torch.bool)
        return super().forward(tokens)


class Apart(Attention):
    def mask(self, scores, padding):
        return super().mask(scores, padding).masked_fill(self.apart, -1e9)


@pytest.mark.parametrize("hides", [False, True])
def test_packed_documents_of_given_lengths_that_see_each_other_are_wrong(hides):
    model = OfLengths(Apart).eval()
    model.hides = hides
    tokens, ends = TOKENS.flatten()[None, :12], torch.tensor([0, 5, 8, 12], dtype=torch.int32)
    findings = check(model, lambda: model(tokens, cu_seqlens=ends)).findings
    assert [(each.verdict, each.name) for each in findings] == ([] if hides else [("wrong", "packed")])


def test_positions_that_begin_within_a_document_are_read():
    model = Decoder(Attention).eval()
    tokens, places = TOKENS[:1], torch.tensor([[T - 1, *range(TOKENS.shape[1] - 1)]])
    assert check(model, lambda: model(tokens, position_ids=places)).findings == ()


def padded_pair(hides):
    """An encoder-decoder whose source is padded, and hidden or not where the decoder reads it."""

    class Hiding(Pair):
        def attend(self, x, memory):
            cross, hidden = self.cross, (self.given == 0)[:, None, None]
            q = cross.split(cross.q_proj(x), cross.heads)
            k, v = cross.split(cross.k_proj(memory), cross.heads), cross.split(cross.v_proj(memory), cross.heads)
            scores = cross.score(q, k)
            scores = scores.masked_fill(hidden, -1e9) if hides else scores
            return cross.out_proj(cross.merge(scores.softmax(-1) @ v))

        def forward(self, source, tokens):
            self.given = source
            at = torch.arange(tokens.shape[1])
            memory, x = self.source(source) + self.places(at), self.target(tokens) + self.places(at)
            memory = memory + self.encoder(self.norms[0](memory), source == 0)
            x = x + self.decoder(self.norms[1](x))
            return self.head(x + self.attend(self.norms[2](x), self.norms[3](memory)))

    return Hiding(None).eval()


@pytest.mark.parametrize("hides", [False, True])
def test_padding_of_a_source_that_a_decoder_sees_is_told(hides):
    model = padded_pair(hides)
    source = TOKENS.clamp(min=1)
    source[1, -2:] = 0
    findings = check(model, lambda: model(source, TOKENS.clamp(min=1))).findings
    assert [each.name for each in findings] == ([] if hides else ["padding"])


def test_cross_attention_with_the_mask_of_the_target_is_wrong():
    class Causal(CrossAttention):
        def score(self, q, k):
            return super().score(q, k).masked_fill(~causal(q @ k.mT), -1e9)

    model = Pair(None).eval()
    model.cross = Causal()
    (finding,) = check(model, lambda: model(TOKENS, TOKENS.flip(1))).findings
    assert (finding.layer, finding.verdict, finding.name) == ("cross", "wrong", "source")


class MixedQueries(Attention):
    """Queries of each head are a learned mixture of those of all."""

    def __init__(self):
        super().__init__()
        self.mixture = nn.Parameter(torch.randn(self.heads, self.heads))

    def place(self, q, k, v):
        return torch.einsum("bhqd,hg->bgqd", q, self.mixture), k, v


def test_what_is_not_judged_is_not_called_right():
    class Mixed(Decoder):
        def __init__(self, kind):
            super().__init__(kind)
            self.blocks[1]["attn"] = MixedQueries()

    model = Mixed(Attention).eval()
    text = str(check(model, lambda: model(TOKENS)))
    assert "Nothing is wrong or odd in those that were judged." in text
    assert "1 of 2 layers were judged." in text


def test_assert_heads_fails_of_an_answer():
    model = REPORTS[0].build()
    with pytest.raises(AssertionError, match="other samples"):
        assert_heads(model, lambda: model(**REPORTS[0].inputs()))


def test_nothing_that_trains_imports_or_asks_a_question(forwards):
    code = "import sys, hdi_callback, hdi_callback.monitor; print('hdi_callback.checks.questions' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
    model = Model(MaskSeesNext)
    with HeadDiversityMonitor(model), pytest.warns(HDIWarning, match="off by one"):
        model(TOKENS)
    assert forwards.count(model) == 1


class QueriesOfZeros(Attention):
    """As in the first decoder layer of DETR: queries are made of zeros and a bias."""

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(self.width, self.width)

    def project(self, x):
        _, k, v = super().project(x)
        return self.split(self.q_proj(0 * x), self.heads), k, v


class TableOfPositions(Attention):
    """As in SAM: a table is longer than this batch needs."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(40, self.d))

    def score(self, q, k):
        return super().score(q, k) + torch.einsum("bhkd,kd->bhk", k, self.table[: k.shape[2]])[:, :, None]


class Compressor(Attention):
    """As in DeepSeek V4: some rows of a map are for a block of tokens before, of which a short batch has none."""

    def __init__(self):
        super().__init__()
        self.compress = nn.Linear(self.width, 2 * self.width)

    def forward(self, x, padding=None):
        return super().forward(x, padding) + self.compress(x)[..., self.width :]


@pytest.mark.parametrize("kind", [QueriesOfZeros, TableOfPositions, Compressor])
def test_maps_of_zeros_and_rows_that_a_short_batch_does_not_reach_need_no_gradient(kind):
    model = Decoder(kind).eval()
    result = check(model, lambda: model(TOKENS))
    assert "gradients" not in result.not_asked
    assert not [each for each in result.findings if each.name == "gradients"]


class SeesItself(Attention):
    def mask(self, scores, padding):
        return scores.masked_fill(~torch.eye(scores.shape[-1], dtype=torch.bool), -1e9)


class FusedSeesItself(SeesItself):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(self.width, 3 * self.width)
        del self.q_proj, self.k_proj, self.v_proj

    def project(self, x):
        return tuple(self.split(part, self.heads) for part in self.qkv(x).chunk(3, -1))


class OneHeadSeesItself(Attention):
    def mask(self, scores, padding):
        itself = torch.eye(scores.shape[-1], dtype=torch.bool)
        return scores.masked_fill(~torch.stack([itself, *[causal(scores)] * (self.heads - 1)]), -1e9)


@pytest.mark.parametrize("kind", [SeesItself, FusedSeesItself, OneHeadSeesItself])
def test_tokens_that_see_a_single_key_are_odd_and_their_queries_and_keys_are_not_accused(kind):
    model = Decoder(kind).eval()
    (finding,) = check(model, lambda: model(TOKENS)).findings
    assert (finding.layer, finding.verdict, finding.name) == ("blocks.0-1.attn", "odd", "single key")
    assert ("in head 0 each token" in finding.text) is (kind is OneHeadSeesItself)


class OnceOnOneToken(Attention):
    """Runs again on the last token alone; the keys of its first head are detached."""

    def project(self, x):
        q, k, v = super().project(x)
        return q, torch.cat([k[:, :1].detach(), k[:, 1:]], 1), v

    def forward(self, x, padding=None):
        return super().forward(x) + super().forward(x[:, -1:])


def test_keys_that_are_alone_in_one_of_two_calls_need_a_gradient():
    model = Decoder(OnceOnOneToken).eval()
    (finding,) = check(model, lambda: model(TOKENS)).findings
    assert (finding.verdict, finding.name) == ("wrong", "gradients")
    assert finding.text.startswith("rows 0-7 of k_proj of blocks.*.attn get exactly no gradient")


class WindowsOfOneToken(Attention):
    def forward(self, x, padding=None):
        return super().forward(x.reshape(-1, 1, self.width)).view_as(x)


@pytest.mark.parametrize(("kind", "length"), [(Attention, 1), (Full, 1), (WindowsOfOneToken, T)])
def test_one_token_alone_is_right(kind, length):
    model = Decoder(kind).eval()
    assert check(model, lambda: model(TOKENS[:, :length])).findings == ()


def test_attention_that_is_detached_as_a_whole_is_not_told_part_by_part():
    class Detached(Attention):
        def project(self, x):
            return tuple(part.detach() for part in super().project(x))

    model = Decoder(Detached).eval()
    assert check(model, lambda: model(TOKENS)).findings == ()


class WindowOfOneHead(Attention):
    """A mask of three dimensions, (heads, queries, keys), for scores of four, or of three with heads in the batch."""

    is_flat = False

    def weigh(self, scores):
        hidden = ~causal(scores).repeat(self.heads, 1, 1)
        hidden[1] |= causal(scores, -2)
        if self.is_flat:
            return scores.flatten(0, 1).masked_fill(hidden.repeat(len(scores), 1, 1), -1e9).softmax(-1).view_as(scores)
        return scores.masked_fill(hidden, -1e9).softmax(-1)

    def mask(self, scores, padding):
        return scores


class WindowOfOneHeadFlat(WindowOfOneHead):
    is_flat = True


@pytest.mark.parametrize(("kind", "heads"), [(WindowOfOneHead, 4), (WindowOfOneHeadFlat, 1)])
def test_a_mask_of_three_dimensions_is_of_heads_or_of_samples_as_scores_are(kind, heads):
    model, facts = Decoder(kind).eval(), []
    survey(model, lambda: model(TOKENS), lambda reader: facts.extend(facts_of(reader)))
    for each in facts:
        earlier, itself, _ = each.seen
        assert bool((itself == 1).all())
        assert len(earlier) == heads
        if heads > 1:
            assert [bool((share == 1).all()) for share in earlier] == [True, False, True, True]
            assert earlier[1].tolist() == [1, *[0] * (T - 2)]


class SecondAxis(nn.Module):
    """Tokens first, one more than are given, and samples behind, of which each is added to the one before it."""

    def __init__(self, mixes):
        super().__init__()
        self.mixes, self.inner = mixes, SequenceFirstAlone()

    def forward(self, x):
        y = self.inner(torch.cat([x[:1], x]))
        return y + y.roll(1, 1) if self.mixes else y


class SequenceFirstAlone(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4)

    def forward(self, x):
        return x + self.attention(x, x, x, need_weights=False)[0]


def test_samples_of_the_second_axis_that_mix_are_told_where_they_mix():
    x = torch.randn(T, B + 1, 32)
    right, wrong = SecondAxis(mixes=False).eval(), SecondAxis(mixes=True).eval()
    assert check(right, lambda: right(x)).findings == ()
    (finding,) = check(wrong, lambda: wrong(x)).findings
    assert (finding.layer, finding.name, finding.verdict) == ("SecondAxis", "samples", "wrong")


class Drawn(Attention):
    """Weights are dropped by numbers of Python or of numpy, in evaluation too."""

    draw = staticmethod(random.random)

    def weigh(self, scores):
        return scores.softmax(-1) * (1 + self.draw())


class DrawnByNumpy(Drawn):
    draw = staticmethod(np.random.random)


@pytest.mark.parametrize("kind", [Drawn, DrawnByNumpy])
def test_numbers_that_are_drawn_outside_of_torch_do_not_stay_from_the_forward_before(kind):
    model = Decoder(kind).eval()
    result = check(model, lambda: model(TOKENS))
    assert result.findings == ()
    assert "random" in result.not_asked["same twice"]


class SecondHidesTheTokenBefore(Attention):
    def mask(self, scores, padding):
        seen = causal(scores) & ~(causal(scores, -1) & ~causal(scores, -2))
        return scores.masked_fill(~seen, -math.inf)


def test_the_token_before_is_told_of_the_layer_that_hides_it():
    model = Decoder(SecondHidesTheTokenBefore).eval()
    model.blocks[0]["attn"] = Full().eval()
    model.blocks[0]["attn"].weigh = lambda scores: (
        torch.eye(scores.shape[-1]).expand_as(scores) + 0 * scores.softmax(-1)
    )
    names = {each.name: each.layer for each in check(model, lambda: model(TOKENS)).findings}
    assert names["token before"] == "blocks.1.attn"


class NormedHeads(Attention):
    normed = "value"

    def __init__(self):
        super().__init__()
        self.norm_of_heads, self.norm_of_all = nn.LayerNorm(self.d), nn.LayerNorm(self.width)

    def place(self, q, k, v):
        return (self.norm_of_heads(q), self.norm_of_heads(k), v) if self.normed == "query" else (q, k, self.value(v))

    def value(self, v):
        return self.norm_of_heads(v) if self.normed == "value" else v

    def merge(self, heads):
        merged = super().merge(self.norm_of_heads(heads) if self.normed == "heads" else heads)
        return self.norm_of_all(merged) if self.normed == "output" else merged


@pytest.mark.parametrize(
    ("normed", "words"),
    [("query", "of queries and keys"), ("value", "of values"), ("heads", "of outputs"), ("output", "of outputs"),
     ("none", None)],
)  # fmt: skip
def test_a_card_says_what_has_a_norm_in_the_attention(normed, words):
    model = Decoder(NormedHeads).eval()
    for block in model.blocks:
        block["attn"].normed = normed
    (card,) = check(model, lambda: model(TOKENS)).cards
    assert card.lines.get("norms") == words


@pytest.mark.parametrize(("past", "kept"), [(0, T), (3, T), (3, T + 5)])
def test_a_causal_mask_behind_a_cache_is_read_as_causal(past, kept):
    class Behind(Full):
        def forward(self, x, padding=None):
            q, k, v = self.project(x)
            empty = torch.zeros(len(x), self.heads, kept - T, self.d)  # a cache that is longer than its tokens
            k, v = (torch.cat([part[:, :, :past], part, empty], 2) for part in (k, v))
            seen = causal(q @ k.mT, past)
            return self.out_proj(self.merge((q @ k.mT / math.sqrt(self.d)).masked_fill(~seen, -1e9).softmax(-1) @ v))

    model = Decoder(Behind).eval()
    result = check(model, lambda: model(TOKENS))
    assert [card.is_causal for card in result.cards] == [True if kept == T else None]
    assert result.findings == ()


class MaskInTheProduct(Full):
    """A mask that the product of queries and keys begins with."""

    def score(self, q, k):
        hidden = torch.zeros(q.shape[2], q.shape[2]).masked_fill(~causal(q @ k.mT), -1e9)
        start = hidden.expand(len(q) * self.heads, -1, -1)
        return torch.baddbmm(start, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=self.d**-0.5).unflatten(
            0, (-1, self.heads)
        )


class DroppedByHand(Attention):
    def weigh(self, scores):
        weights = scores.softmax(-1)
        return weights * (torch.rand_like(weights) > 0.3) / 0.7 if self.training else weights


class DecaysBehind(Full):
    def weigh(self, scores):
        at = torch.arange(scores.shape[-1])
        return scores.softmax(-1) * 0.9 ** (at[:, None] - at).clamp(min=0)


class HidesByScores(Full):
    def mask(self, scores, padding):
        return scores.masked_fill(scores < scores.mean(-1, keepdim=True), -1e9)


@pytest.mark.parametrize(
    ("kind", "line"),
    [(MaskInTheProduct, "scores"), (DroppedByHand, "softmax"), (DecaysBehind, "positions"), (HidesByScores, "scores")],
)
def test_a_fact_that_is_not_read_is_not_known_and_never_none(kind, line):
    model = Decoder(kind).train()
    assert "not known" in check(model, lambda: model(TOKENS)).cards[0].lines[line]


def test_the_mask_of_grouped_heads_is_read_where_an_einsum_puts_them_together():
    model = Decoder(GroupedByBroadcast).eval()
    assert [card.is_causal for card in check(model, lambda: model(TOKENS)).cards] == [True]


class MadeAndNotNamed(Attention):
    def __init__(self):
        super().__init__()
        self.segment = nn.Parameter(torch.randn(self.width))


class AnOption(MadeAndNotNamed):
    def forward(self, x, padding=None, segments=None):
        return super().forward(x if segments is None else x + segments * self.segment, padding)


@pytest.mark.parametrize(("kind", "count"), [(MadeAndNotNamed, 1), (AnOption, 0)])
def test_a_parameter_that_no_forward_reads_is_odd_unless_code_names_it(kind, count):
    model = Decoder(kind).eval()
    findings = check(model, lambda: model(TOKENS)).findings
    assert [(each.verdict, each.name) for each in findings] == [("odd", "gradients")] * count


class Flexible(Attention):
    """FlexAttention of the queries behind a cache."""

    def __init__(self, visible, past):
        super().__init__()
        self.visible, self.past = visible, past

    def forward(self, x, padding=None):
        q, k, v = (part.contiguous() for part in self.project(x))
        mask = create_block_mask(self.visible, len(x), self.heads, x.shape[1] - self.past, x.shape[1], device="cpu")
        y = self.merge(flex_attention(q[:, :, self.past :].contiguous(), k, v, block_mask=mask))
        return self.out_proj(torch.cat([torch.zeros_like(x[:, : self.past]), y], 1))


@pytest.mark.parametrize(
    ("visible", "past", "is_causal", "name"),
    [
        (lambda b, h, q, k: q >= k, 0, True, ""),
        (lambda b, h, q, k: (q >= k) & ((h != 1) | (q - k < 2)), 0, True, ""),
        (lambda b, h, q, k: q + 1 >= k, 0, False, "mask"),
        (lambda b, h, q, k: q + 3 >= k, 3, True, ""),
        (lambda b, h, q, k: q >= k, 3, None, "token before"),
    ],
    ids=["causal", "window of a head", "off by one", "behind a cache", "at the top left of a cache"],
)
def test_masks_of_flex_attention_are_read_also_where_queries_are_fewer_than_keys(visible, past, is_causal, name):
    model = Decoder(lambda: Flexible(visible, past)).eval()
    tokens = torch.randint(VOCABULARY, (B + 1, 10), generator=torch.Generator().manual_seed(1))
    result = check(model, lambda: model(tokens))
    assert [card.is_causal for card in result.cards] == [is_causal]
    assert [finding.name for finding in result.findings] == [name] * bool(name)


class GatedBySums(Attention):
    """As in WavLM: a gate of each head is the sum of features."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(self.width, 4 * self.heads)

    def score(self, q, k):
        return super().score(q, k) * self.gates.sigmoid()

    def forward(self, x, padding=None):
        self.gates = self.gate(x).unflatten(-1, (self.heads, 4)).sum(-1).transpose(1, 2)[..., None]
        return super().forward(x, padding)


def test_features_of_a_gate_that_are_added_up_are_right():
    model = Decoder(GatedBySums).eval()
    assert not check(model, lambda: model(TOKENS)).findings


class Cut(Attention):
    """Rows of heads that are not used, as where a head is cut off."""

    def merge(self, heads):
        return super().merge(torch.cat([heads[:, :-1], torch.zeros_like(heads[:, -1:])], 1))


class Gated(Attention):
    """An activation behind the heads, flat where values lie, and scores of which a softmax makes ones and zeros."""

    def __init__(self):
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.data.normal_(0, {"out_proj.weight": 0.2}.get(name, 60.0))

    def merge(self, heads):
        return super().merge(heads).relu()


class GatedAndCut(Gated, Cut):
    pass


@pytest.mark.parametrize(("kind", "is_told"), [(Gated, False), (GatedAndCut, True)])
def test_rows_that_an_activation_or_a_sharp_softmax_hides_from_the_loss_are_used(kind, is_told):
    torch.manual_seed(0)
    model = Decoder(kind).eval()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    (model(TOKENS) ** 2).sum().backward()
    dead = [not bool(block["attn"].v_proj.weight.grad.any(1).all()) for block in model.blocks]
    assert any(dead), "the case needs rows without a gradient"
    result = check(model, lambda: model(TOKENS))
    assert "gradients" not in result.not_asked
    assert any(each.name == "gradients" for each in result.findings) == is_told
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


class AllStates(Decoder):
    """The states of all layers, that of the embedding first."""

    def forward(self, tokens):
        states = [self.embed(tokens) + self.places(torch.arange(tokens.shape[1]))]
        for block in self.blocks:
            states.append(block["norm"](states[-1] + block["attn"](block["norm"](states[-1]))))
        return {"states": states}


@pytest.mark.parametrize(("kind", "names"), [(Attention, []), (MaskSeesNext, ["mask"])])
def test_of_the_states_of_all_layers_the_last_is_looked_at(kind, names):
    model = AllStates(kind).eval()
    result = check(model, lambda: model(TOKENS))
    assert "token before" not in result.not_asked
    assert [each.name for each in result.findings] == names


class Lengthened(Decoder):
    """Each token is repeated as often as it says, and rows are padded to the longest."""

    def forward(self, tokens):
        rows = super().forward(tokens)
        each = [row.repeat_interleave(1 + ids % 3, 0) for row, ids in zip(rows, tokens)]
        return nn.utils.rnn.pad_sequence(each, batch_first=True)


def test_outputs_whose_length_depends_on_the_batch_are_not_compared():
    model = Lengthened(Full).eval()
    tokens = torch.zeros_like(TOKENS)
    tokens[0] = 2  # the longest, which is changed
    tokens[:, 0] = torch.arange(1, len(tokens) + 1)
    result = check(model, lambda: model(tokens))
    assert not [each for each in result.findings if each.name == "samples"]


def test_a_target_that_is_its_source_is_no_label():
    model = Pair(None).eval()
    result = check(model, lambda: model(TOKENS, TOKENS))
    assert not result.findings
    assert result.not_asked["later tokens"].startswith("more than one sequence goes in")


def test_an_attention_that_is_the_model_itself_is_asked_for_gradients():
    class FirstKeyHead(Attention):
        def expand(self, k):
            return k[:, :1].expand(-1, self.heads, -1, -1)

    x = torch.randn(B + 1, T, 32, generator=torch.Generator().manual_seed(1))
    wrong, right = FirstKeyHead().eval(), Attention().eval()
    assert [finding.name for finding in check(wrong, lambda: wrong(x)).findings] == ["gradients"]
    assert check(right, lambda: right(x)).findings == ()


class Discards(Decoder):
    """The result of a map beside the attention is used, used by a choice alone, or not used."""

    def __init__(self, use):
        super().__init__(Attention)
        self.use, self.blocks[1]["mlp"] = use, nn.Linear(32, 32)

    def forward(self, tokens):
        x = self.embed(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = x + block["attn"](block["norm"](x))
        return self.head(self.use(x, self.blocks[1]["mlp"](x)))


@pytest.mark.parametrize(
    ("use", "names"),
    [
        (lambda x, y: x + y, []),
        (lambda x, y: x * (y.argmax(-1, keepdim=True) % 2 + 1), []),  # without a gradient
        (lambda x, y: x + x, ["used"]),
    ],
)
def test_a_result_in_a_block_that_reaches_no_output_is_odd_and_one_that_is_chosen_by_is_not(use, names):
    model = Discards(use).eval()
    found = check(model, lambda: model(TOKENS))
    assert [(finding.verdict, finding.name) for finding in found.findings] == [("odd", name) for name in names]


def test_a_last_layer_that_is_left_out_as_a_whole_is_no_finding():
    class StateBefore(Decoder):
        def forward(self, tokens):
            states = [self.embed(tokens) + self.places(torch.arange(tokens.shape[1]))]
            for block in self.blocks:
                states.append(states[-1] + block["attn"](block["norm"](states[-1])))
            return self.head(states[-2])

    model = StateBefore(Attention).eval()
    assert "used" not in [finding.name for finding in check(model, lambda: model(TOKENS)).findings]


def test_labels_that_are_the_tokens_themselves_are_no_second_sequence():
    config = {"decoder_layers": 1, "decoder_attention_heads": 4, "d_model": 32, "vocab_size": 64, "is_decoder": True}
    torch.manual_seed(0)
    model = transformers.MBartForCausalLM(transformers.MBartConfig(**config))  # its table of positions takes tokens
    tokens = torch.randint(5, 60, (2, 7))
    assert check(model.eval(), lambda: model(input_ids=tokens, labels=tokens)).wrong == ()


def option_beside_an_unbound_name():
    """An attention with a bias that only a branch of its decorated forward reads, beside a name that is never bound."""
    for helper in ():
        helper()

    class WithOption(Attention):
        is_shifted = False

        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.randn(self.width))

        @(lambda function: lambda *args: function(*args))
        def forward(self, x, padding=None):
            return Attention.forward(self, x + self.shift if self.is_shifted else x, padding)

        def clean(self):
            return helper()

    return WithOption()


def test_an_option_in_decorated_code_is_none_where_its_class_uses_a_name_that_is_not_bound():
    model = Decoder(option_beside_an_unbound_name).eval()
    with pytest.raises(NameError):
        model.blocks[0]["attn"].clean()
    result = check(model, lambda: model(TOKENS))
    assert "gradients" not in result.not_asked
    assert result.findings == ()


class TableOfAll(nn.Module):
    """Padding is seen; positions are a table that is added as a whole, or as far as there are tokens."""

    def __init__(self, is_cut):
        super().__init__()
        self.embed, self.table = nn.Embedding(VOCABULARY, 32, padding_idx=0), nn.Parameter(torch.randn(T, 32))
        self.attention, self.is_cut = Full(), is_cut

    def forward(self, tokens):
        x = self.embed(tokens) + self.table[: tokens.shape[1] if self.is_cut else None]
        return x + self.attention(x)


@pytest.mark.parametrize("is_cut", [True, False])
def test_padding_that_is_seen_is_told_where_the_model_takes_no_shorter_rows_too(is_cut):
    torch.manual_seed(0)
    model = TableOfAll(is_cut).eval()
    tokens = TOKENS.clamp(min=1)
    tokens[1, -2:] = 0
    if not is_cut:
        with pytest.raises(RuntimeError):
            model(tokens[:, :-2])
    found = check(model, lambda: model(tokens)).findings
    assert [(each.verdict, each.name) for each in found] == [("odd", "padding")]


class Graphs(nn.Module):
    """Nodes of all graphs attend to each other, or to those of their own; outputs are by graph."""

    def __init__(self, hides):
        super().__init__()
        self.enter, self.leave, self.hides = nn.Linear(5, 32), nn.Linear(32, 3), hides
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, nodes, batch):
        x, hidden = self.enter(nodes)[None], batch[:, None] != batch
        y = x + self.attention(x, x, x, attn_mask=hidden if self.hides else None, need_weights=False)[0]
        return self.leave(torch.stack([y[0, batch == number].mean(0) for number in range(int(batch[-1]) + 1)]))


@pytest.mark.parametrize(("hides", "names"), [(True, []), (False, ["packed"])])
def test_graphs_that_see_each_other_are_told_by_the_numbers_of_their_nodes(hides, names):
    torch.manual_seed(0)
    model = Graphs(hides).eval()
    nodes, batch = torch.randn(9, 5), torch.tensor([0, 0, 1, 1, 1, 1, 2, 2, 2])
    with torch.no_grad():
        alone = model(nodes[:2], batch[:2])
        assert torch.allclose(alone, model(nodes, batch)[:1], atol=1e-5) is hides
    assert [each.name for each in check(model, lambda: model(nodes, batch)).findings] == names


class Numbered(nn.Module):
    """Tokens in a row see each other, and each has a number, of which a value is looked up."""

    def __init__(self):
        super().__init__()
        self.enter, self.value, self.leave = nn.Linear(5, 32), nn.Embedding(T, 32), nn.Linear(32, 3)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x, number=None, batch=None):
        x = (self.enter(x) + self.value(batch if number is None else number))[None]
        return self.leave((x + self.attention(x, x, x, need_weights=False)[0])[0])


@pytest.mark.parametrize(
    "given",
    [
        {"number": torch.arange(T)},
        {"number": torch.arange(T) // 3},
        {"batch": torch.arange(T)},
    ],
    ids=["residues", "labels in order", "one node a graph"],
)
def test_numbers_of_tokens_are_no_numbers_of_graphs(given):
    torch.manual_seed(0)
    model, x = Numbered().eval(), torch.randn(T, 5)
    result = check(model, lambda: model(x, **given))
    assert "packed" in result.not_asked
    assert "packed" not in [each.name for each in result.findings]


class OneToken(nn.Module):
    """The token with the highest score is given to all: its weight is 1, and the scores get no gradient."""

    def __init__(self):
        super().__init__()
        self.weight, self.value = nn.Parameter(torch.randn(32, 1)), nn.Linear(32, 32)

    def weigh(self, scores):
        return scores.masked_fill(scores < scores.amax(1, keepdim=True), -math.inf).softmax(1)

    def forward(self, x, padding=None):
        return (self.weigh(x @ self.weight) * self.value(x)).sum(1, keepdim=True).expand_as(x)


class EveryToken(OneToken):
    """A softmax over an axis of one: all weights are 1, whatever the scores are."""

    def weigh(self, scores):
        return scores.softmax(-1)


@pytest.mark.parametrize(("kind", "is_told"), [(OneToken, False), (EveryToken, True)])
def test_what_chooses_without_a_gradient_is_used(kind, is_told):
    torch.manual_seed(0)
    model = Decoder(kind).eval()
    model(TOKENS).square().sum().backward()
    assert not any(bool(block["attn"].weight.grad.any()) for block in model.blocks)
    found = check(model, lambda: model(TOKENS)).findings
    assert any(each.text.startswith("weight of blocks.*.attn get exactly no gradient") for each in found) is is_told


class MapOfEachHead(Full):
    """Heads are cut out of the input, and each has a map of its own, or all have one."""

    def __init__(self, maps):
        super().__init__()
        self.maps = nn.ParameterList(nn.Parameter(torch.randn(maps, self.d, self.d) * self.d**-0.5) for _ in range(3))

    def project(self, x):
        parts = self.split(x, self.heads)
        return tuple(parts @ (one if len(one) > 1 else one[0]) for one in self.maps)


@pytest.mark.parametrize(("maps", "names"), [(4, []), (1, ["shared map"])])
def test_one_map_of_the_parts_of_all_heads_is_odd_and_one_of_each_head_is_not(maps, names):
    torch.manual_seed(0)
    model = Decoder(lambda: MapOfEachHead(maps)).eval()
    found = check(model, lambda: model(TOKENS)).findings
    assert [each.name for each in found if each.name == "shared map"] == names


class AddsItsMask(Full):
    """A mask of truth values is added, or converted before."""

    converts = False

    def score(self, q, k):
        seen = causal(q @ k.mT)
        return super().score(q, k) + (torch.zeros(seen.shape).masked_fill(~seen, -math.inf) if self.converts else seen)


class ConvertsItsMask(AddsItsMask):
    converts = True


@pytest.mark.parametrize(("kind", "names"), [(AddsItsMask, ["mask without effect"]), (ConvertsItsMask, [])])
def test_truth_values_that_are_added_hide_nothing(kind, names):
    torch.manual_seed(0)
    model = Decoder(kind).eval()
    result = check(model, lambda: model(TOKENS))
    assert [each.name for each in result.findings] == names
    assert [card.is_causal for card in result.cards] == [kind is ConvertsItsMask]


class Global(Attention):
    """A layer that sees everything before it; its configuration has the window of others, which are local."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(sliding_window=3)


class Local(Global):
    def mask(self, scores, padding):
        return super().mask(scores, padding).masked_fill(causal(scores, -self.config.sliding_window), -1e9)


def test_a_window_that_only_the_configuration_holds_is_not_one_of_each_layer():
    torch.manual_seed(0)
    model = Decoder(iter([Local(), Global()]).__next__).eval()
    masks = [block["attn"].mask(torch.zeros(1, 1, T, T), None)[0, 0, -1, 0] for block in model.blocks]
    assert [bool(hidden < -1e8) for hidden in masks] == [True, False]
    assert check(model, lambda: model(TOKENS)).findings == ()


def test_upper_layers_of_qwen_see_everything_before_them():
    config = transformers.Qwen2MoeConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_experts=2,
        num_experts_per_tok=2, shared_expert_intermediate_size=16, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, use_sliding_window=True, max_window_layers=2, sliding_window=4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen2MoeForCausalLM(config).eval()
    tokens = TOKENS[:2].repeat(1, 2)
    assert check(model, lambda: model(input_ids=tokens)).wrong == ()
