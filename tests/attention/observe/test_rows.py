"""Rows that are observed in a forward are the attention weights that the model itself returns."""

from __future__ import annotations

import operator
from functools import reduce

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hdi_callback.attention.observe import AttentionObserver
from hdi_callback.attention.observe.regions import closed_reason
from hdi_callback.core.kernels import AttentionSums
from hdi_callback.core.norms import logit_bound
from tests.attention.observe.oracle import Rows, against_eager, observed, observed_sums
from tests.attention.sweep.architectures import config_of, variants

B, T, S = 3, 11, 7
ENCODERS = ["bert", "albert", "roberta", "modernbert", "deberta-v2", "mpnet"]
DECODERS = [
    "gpt2", "gpt_neox", "llama", "mistral", "gemma2", "qwen3", "olmo2", "gpt_oss", "bloom", "mpt", "opt", "phi3",
]  # fmt: skip
BOTH = ["t5", "bart"]
PADDING = {"none": slice(0, 0), "left": slice(0, 4), "right": slice(T - 4, T)}


def built(family: str) -> nn.Module:
    torch.manual_seed(0)
    return next(variants(family)).eval()


def inputs_of(family: str, padding: str) -> dict[str, torch.Tensor]:
    tokens = torch.randint(5, 50, (B, T), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(B, T, dtype=torch.long)
    mask[1, PADDING[padding]] = 0
    inputs = {"input_ids": tokens} | ({} if padding == "none" else {"attention_mask": mask})
    if family in BOTH:
        inputs["decoder_input_ids"] = tokens[:, :S]
    return inputs if family in ENCODERS else {**inputs, "use_cache": False}


@pytest.mark.some_slow(quick=25)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS, *BOTH])
def test_rows_are_the_weights_that_the_model_returns(family, padding, implementation):
    model = built(family)
    comparisons, returned = against_eager(model, inputs_of(family, padding), implementation)
    assert len(comparisons) == (1 if family == "albert" else returned)  # whose layers are one that runs again
    assert [one.unread for one in comparisons if one.unread] == []
    assert max(one.error for one in comparisons) < 1e-5
    queries = B * T - (4 if padding != "none" else 0)
    decoder = B * S  # queries of a decoder see its own tokens, or those of the encoder
    for one in comparisons:
        assert one.read == (decoder if family in BOTH and "decoder" in one.module else queries), one.module


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_rows_of_whisper_are_those_that_it_returns(implementation):
    model, config = built("whisper"), config_of("whisper")
    sound = torch.randn(B, config.num_mel_bins, config.max_source_positions * 2)
    inputs = {"input_features": sound, "decoder_input_ids": torch.arange(B * S).view(B, S), "use_cache": False}
    comparisons, returned = against_eager(model, inputs, implementation)
    assert len(comparisons) == returned == 3 * config.decoder_layers
    assert max(one.error for one in comparisons) < 1e-5


class TorchAttention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 4, **options)

    def forward(self, x, memory=None, **masks):
        memory = x if memory is None else memory
        return self.attn(x, memory, memory, **masks)


@pytest.mark.parametrize("needs_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", ["none", "padding", "causal", "both", "bias"])
def test_rows_of_torchs_own_attention_are_those_that_it_returns(mask, batch_first, needs_weights):
    torch.manual_seed(0)
    model = TorchAttention(batch_first=batch_first)
    x = torch.randn(B, T, 16)
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[1, -4:] = True
    causal = torch.ones(T, T, dtype=torch.bool).triu(1)
    masks = {
        "none": {}, "padding": {"key_padding_mask": padding}, "causal": {"attn_mask": causal},
        "both": {"key_padding_mask": padding, "attn_mask": causal}, "bias": {"attn_mask": torch.randn(B * 4, T, T)},
    }[mask]  # fmt: skip
    ordered = x if batch_first else x.transpose(0, 1)
    _, expected = model(ordered, average_attn_weights=False, need_weights=True, **masks)
    (core,) = observed(model, lambda: model(ordered, need_weights=needs_weights, **masks)).cores
    assert core.unread == ""
    read = 0
    for chunk in core.rows.chunks:
        sees = chunk.visible.any(-1, keepdim=True)
        there = expected[chunk.sequences][:, :, chunk.positions]
        assert ((chunk.weights - there).abs() * sees).max() < 1e-6
        read += int(sees[:, 0].sum())
    assert read == B * T - (4 if "padding" in masks or mask in ("padding", "both") else 0)


class ByHand(nn.Module):
    """Attention as it is written out, in many ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.heads = way, 4
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.sinks = nn.Parameter(torch.randn(4))
        self.weights: torch.Tensor | None = None

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = (part.view(B, T, 4, 4) for part in self.qkv(x).chunk(3, -1))
        out = getattr(self, self.way)(q, k, v)
        return self.out(out.reshape(B, T, 16))

    def keep(self, weights):
        """(B, H, T, T), before dropout"""
        self.weights = weights.detach()
        return weights

    def transposed(self, q, k, v):
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        return (self.keep((q @ k.transpose(-2, -1) / 2).softmax(-1)) @ v).transpose(1, 2)

    def by_einsum(self, q, k, v):
        weights = self.keep(torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.5, dim=-1))
        return torch.einsum("bhqk,bkhd->bqhd", F.dropout(weights, 0.1, training=False), v)

    def heads_last(self, q, k, v):
        weights = torch.einsum("bihd,bjhd->bijh", q, k).mul(0.5).softmax(2)
        self.keep(weights.permute(0, 3, 1, 2))
        return torch.einsum("bijh,bjhd->bihd", weights, v)

    def keys_first(self, q, k, v):
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        weights = (k @ q.mT / 2).softmax(-2)  # (B, H, keys, queries)
        self.keep(weights.mT)
        return (v.mT @ weights).mT.transpose(1, 2)

    def in_place(self, q, k, v):
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        scores = q @ k.mT
        scores *= 0.5
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
        return (self.keep(F.softmax(scores, -1)) @ v).transpose(1, 2)

    def one_dimension(self, q, k, v):
        q, k, v = (one.transpose(1, 2).flatten(0, 1) for one in (q, k, v))
        weights = torch.bmm(q, k.transpose(1, 2)).div(2.0).softmax(-1)
        self.keep(weights.view(-1, 4, *weights.shape[1:]))
        return torch.bmm(weights, v).view(-1, 4, *v.shape[1:]).transpose(1, 2)

    def with_sinks(self, q, k, v):
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        scores = q @ k.mT / 2
        sinks = self.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
        scores = scores - scores.max(-1, keepdim=True).values
        return (self.keep(scores.softmax(-1)[..., :-1]) @ v).transpose(1, 2)

    def filled_with_tensors(self, q, k, v):
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        hidden = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k.mT / 2).masked_fill(hidden, torch.tensor(-torch.inf, device=q.device))
        weights = scores.softmax(-1).masked_fill(hidden, torch.tensor(0.0, device=q.device))
        return (self.keep(weights) @ v).transpose(1, 2)

    def _as_pictures(self, q, k, v):
        q, k, v = (one.transpose(1, 2).flatten(0, 1) for one in (q, k, v))
        width = q.shape[1] // 2  # tokens are those of two rows
        scores = (q @ k.mT / 2).view(-1, 2, width, 2, width)
        scores = scores + torch.arange(width, device=q.device) / 9
        scores = scores.masked_fill(torch.eye(2, dtype=torch.bool, device=q.device)[:, None, :, None], -torch.inf)
        weights = scores.view(-1, 2 * width, 2 * width).softmax(-1)
        self.keep(weights.view(-1, 4, *weights.shape[1:]))
        return (weights @ v).view(-1, 4, *v.shape[1:]).transpose(1, 2)

    def capped(self, q, k, v):
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        scores = torch.tanh(q @ k.mT / 2 / 3.0) * 3.0
        return (self.keep(scores.softmax(-1)) @ v).transpose(1, 2)

    def grouped(self, q, k, v):
        q, k, v = q.unflatten(2, (2, 2)), k[:, :, :2], v[:, :, :2]
        weights = torch.einsum("bqgrd,bkgd->bgrqk", q, k).softmax(-1)
        self.keep(weights.flatten(1, 2))
        return torch.einsum("bgrqk,bkgd->bqgrd", weights, v).flatten(2, 3)

    def fused_and_grouped(self, q, k, v):
        q, k, v = q.transpose(1, 2), k[:, :, :2].transpose(1, 2), v[:, :, :2].transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.7, enable_gqa=True)
        scores = (q @ k.repeat_interleave(2, 1).mT * 0.7).masked_fill(torch.ones(T, T).triu(1) > 0, -torch.inf)
        self.keep(scores.softmax(-1))
        return out.transpose(1, 2)


WAYS = [name for name in vars(ByHand) if name not in ("forward", "keep") and not name.startswith("_")]


@pytest.mark.parametrize("way", WAYS)
def test_attention_weights_written_out_by_hand_are_read_for_every_way_to_write_them(way):
    torch.manual_seed(0)
    model, x = nn.Sequential(ByHand(way)), torch.randn(B, T, 16)
    cores = observed(model, lambda: model(x)).cores
    assert [core.unread for core in cores] == [""]
    assert (cores[0].kind, cores[0].heads) == ("softmax", 4)
    expected = model[0].weights
    for chunk in cores[0].rows.chunks:
        there = expected[chunk.sequences][:, :, chunk.positions]
        assert torch.allclose(chunk.weights, there, atol=1e-6)
    assert sum(chunk.weights[:, 0, :, 0].numel() for chunk in cores[0].rows.chunks) == B * T


def test_rows_are_read_if_scores_are_viewed_as_pictures_in_between():
    torch.manual_seed(0)
    model, x = nn.Sequential(ByHand("_as_pictures")), torch.randn(B, 10, 16)
    (core,) = observed(model, lambda: model(x)).cores
    assert (core.unread, core.heads) == ("", 4)
    for chunk in core.rows.chunks:
        torch.testing.assert_close(chunk.weights, model[0].weights[chunk.sequences][:, :, chunk.positions])
        assert (chunk.visible.sum(-1) == 5).all()  # a token sees those of the other row


@pytest.mark.parametrize("way", [way for way in WAYS if way != "one_dimension"])  # told apart by what maps gave
def test_observing_handwritten_attention_reads_no_value_on_the_host(way):
    """A tensor on the meta device has no numbers: whoever asks for one fails."""
    model = nn.Sequential(ByHand(way)).to("meta")
    observer = AttentionObserver(
        model, reduce_rows=lambda chunk: chunk.weights.sum(), reduce_norms=lambda features, _: features.sum()
    )
    observer.arm()
    with torch.device("meta"):
        model(torch.randn(B, T, 16, device="meta"))
    observer.disarm()
    assert observer.failures == []
    assert [core.unread for core in observer.cores] == [""]


@pytest.mark.parametrize("way", ["transposed", "by_einsum", "in_place", "one_dimension", "capped", "fused_and_grouped"])
def test_no_attention_logit_exceeds_its_bound_and_the_bound_is_tight(way):
    torch.manual_seed(0)
    model, x = nn.Sequential(ByHand(way)), torch.randn(B, T, 16)
    (core,) = observed_sums(model, lambda: model(x)).cores
    assert core.is_bounded
    query, key = core.norms["query"], core.norms["key"]
    bias = 0.0 if core.bias is None else float(core.bias)
    bound = logit_bound(query, key, abs(float(core.scale)), bias=bias)
    largest = core.rows.rows().logit
    assert (largest <= bound * (1 + 1e-5)).all()
    assert (largest > 0.05 * bound).all()  # it is no bound that anything would satisfy


def test_attention_rows_reduced_in_chunks_give_the_same_sums(monkeypatch):
    torch.manual_seed(0)
    model, x = nn.Sequential(ByHand("transposed")), torch.randn(B, T, 16)
    whole = observed(model, lambda: model(x)).cores[0].rows
    monkeypatch.setattr("hdi_callback.attention.observe.scores.rows.BUDGET", 4 * T * 2)  # two queries of four heads
    pieces = observed(model, lambda: model(x)).cores[0].rows
    assert len(pieces.chunks) > len(whole.chunks)
    sums = [
        reduce(operator.add, (AttentionSums.of(one.weights, one.visible) for one in rows.chunks))
        for rows in (whole, pieces)
    ]
    assert torch.allclose(sums[0].rows().entropy, sums[1].rows().entropy)
    assert torch.allclose(sums[0].rows().product, sums[1].rows().product)


def test_only_few_queries_of_a_long_sequence_are_read():
    torch.manual_seed(0)
    model, x = nn.Sequential(ByHand("transposed")), torch.randn(2, 300, 16)
    (core,) = observed(model, lambda: model(x), max_queries=16).cores
    assert isinstance(core.rows, Rows)
    read = [chunk.weights.shape for chunk in core.rows.chunks]
    assert sum(sequences * queries for sequences, _, queries, _ in read) == 16
    assert all(keys == 300 for *_, keys in read)


class Choosing(nn.Module):
    """Attention of or to a few tokens, which heads choose each for itself or all alike."""

    def __init__(self, role: str, way: str, *, fused: bool) -> None:
        super().__init__()
        self.role, self.way, self.fused = role, way, fused
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def choose(self, x):
        """(B, H, T, width) -> (B, H, 3, width)"""
        top = x.square().sum(-1).topk(3).indices  # (B, H, 3)
        if self.way == "by index":
            return x[torch.arange(B)[:, None, None], torch.arange(4)[:, None], top]
        if self.way == "by index, sequences and heads in one":
            x, top = x.flatten(0, 1), top.flatten(0, 1)
            return x[torch.arange(len(x))[:, None], top].unflatten(0, (B, 4)) * 1.0
        if self.way == "gathered":
            return x.gather(2, top[..., None].expand(-1, -1, -1, x.shape[-1])) / 2
        if self.way == "gathered, then cut in two":
            parts = x.gather(2, top[..., None].expand(-1, -1, -1, x.shape[-1])).chunk(2, -1)
            return torch.cat(parts, -1)
        if self.way == "taken, then moved":
            return torch.take_along_dim(x, top[..., None], 2).transpose(1, 2).contiguous().transpose(1, 2)
        if self.way == "alike, moved":  # (B, H, T, width) of tokens that a sequence chooses
            kept = x.transpose(1, 2)[torch.arange(B)[:, None], top[:, 0]]  # (B, 3, H, width)
            return torch.cat([kept[..., :2] * 1.0, kept[..., 2:]], -1).permute(0, 2, 1, 3)
        if self.way == "alike, one index":
            return x[:, :, top[0, 0]]
        return x.gather(2, top[:, :1, :, None].expand(-1, x.shape[1], -1, x.shape[-1]))

    def forward(self, x):
        q, k, v = (part.view(B, T, 4, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.role == "query":
            q = self.choose(q)
        else:
            k, v = self.choose(k), v[:, :, :3]
        out = F.scaled_dot_product_attention(q, k, v) if self.fused else (q @ k.mT / 2).softmax(-1) @ v
        return self.out(out.transpose(1, 2).flatten(2))


EACH_FOR_ITSELF = [
    "by index", "by index, sequences and heads in one", "gathered", "gathered, then cut in two", "taken, then moved",
]  # fmt: skip


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("role", ["query", "key"])
@pytest.mark.parametrize("way", [*EACH_FOR_ITSELF, "alike, moved", "alike, one index", "alike, gathered"])
def test_rows_are_not_read_if_each_head_chooses_its_own_queries_or_keys(way, role, fused):
    torch.manual_seed(0)
    model = nn.Sequential(Choosing(role, way, fused=fused))
    observer = observed(model, lambda: model(torch.randn(B, T, 16)))
    (core,) = observer.cores
    assert observer.failures == []
    if way in EACH_FOR_ITSELF:
        which = {"query": "queries", "key": "keys"}[role]
        assert core.unread == f"each head chooses its own {which}, so that the rows of two heads do not compare"
        assert core.rows is None
    else:
        assert core.unread == ""
        assert core.rows is not None


class TurnedByGatheredPositions(nn.Module):
    """Rotary positions that are gathered from a table by the positions of each token, as in GPT-J."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.weights = torch.empty(0)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 4)) for part in self.qkv(x).chunk(3, -1))  # (B, T, H, width)
        angle = torch.arange(20)[:, None] / torch.tensor([1.0, 10.0])
        table = torch.cat([angle.sin(), angle.cos()], -1).repeat(B, 1, 1)
        places = (torch.arange(T) + 3 * torch.arange(B)[:, None])[..., None].repeat(1, 1, 4)
        sin, cos = (part[:, :, None].repeat_interleave(2, 3) for part in table.gather(1, places).split(2, -1))
        q, k = (part * cos + torch.stack([-part[..., 1::2], part[..., ::2]], -1).flatten(-2) * sin for part in (q, k))
        self.weights = (q.permute(0, 2, 1, 3) @ k.permute(0, 2, 3, 1) / 2).softmax(-1)
        return self.out((self.weights @ v.transpose(1, 2)).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("is_inference", [False, True])
def test_rows_are_read_if_positions_of_tokens_are_gathered_from_a_table(is_inference):
    torch.manual_seed(0)
    model, x = nn.Sequential(TurnedByGatheredPositions()), torch.randn(B, T, 16)
    with torch.inference_mode(is_inference):
        observer = observed(model, lambda: model(x))
    (core,) = observer.cores
    assert (core.unread, observer.failures) == ("", [])
    for chunk in core.rows.chunks:
        torch.testing.assert_close(chunk.weights, model[0].weights[chunk.sequences][:, :, chunk.positions])


DOCUMENTS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 2])


@pytest.mark.parametrize("way", ["written out", "fused, of truth values", "fused, of numbers", "torch's own"])
def test_rows_of_packed_documents_have_only_the_keys_of_their_document(way):
    torch.manual_seed(0)
    length = len(DOCUMENTS)
    sees = (DOCUMENTS[:, None] == DOCUMENTS) & torch.ones(length, length, dtype=torch.bool).tril()
    qkv, attention = torch.nn.Linear(16, 48), nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(B, length, 16)
    kept = []

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.attention = qkv, attention

        def forward(self, x):
            if way == "torch's own":
                return self.attention(x, x, x, attn_mask=~sees, need_weights=False)[0]
            q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            scores = (q @ k.mT / 2).masked_fill(~sees, -torch.inf)
            kept.append(scores.softmax(-1))
            if way == "written out":
                return kept[-1] @ v
            mask = sees if "truth" in way else torch.zeros(length, length).masked_fill(~sees, -torch.inf)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    model = Packed()
    cores = observed(model, lambda: model(x)).cores
    core = next(core for core in cores if core.rows is not None)
    expected = attention(x, x, x, attn_mask=~sees, average_attn_weights=False)[1] if way == "torch's own" else kept[0]
    for chunk in core.rows.chunks:
        assert torch.equal(chunk.visible.expand_as(chunk.weights)[0, 0], sees[chunk.positions])
        assert torch.allclose(chunk.weights, expected[chunk.sequences][:, :, chunk.positions], atol=1e-6)
    assert sum(chunk.weights[:, 0, :, 0].numel() for chunk in core.rows.chunks) == B * length


class ByOperator(nn.Module):
    """Calls an operator as graphs of `torch.export` do; some take heads in front of tokens, some behind them."""

    def __init__(self, operator, heads_first=True):
        super().__init__()
        self.qkv, self.operator, self.heads_first = nn.Linear(16, 48), operator, heads_first

    def forward(self, x):
        parts = [part.unflatten(-1, (4, 4)) for part in self.qkv(x).chunk(3, -1)]
        result = self.operator(*(part.transpose(1, 2) if self.heads_first else part for part in parts))
        return result if isinstance(result, torch.Tensor) else result[0]


@torch.library.custom_op("hdi_tests::flash_attn", mutates_args=())
def _flash_attn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    swapped = (one.transpose(1, 2) for one in (query, key, value))
    return F.scaled_dot_product_attention(*swapped).transpose(1, 2).contiguous()


ATEN = torch.ops.aten
OPERATORS = {
    "aten, one name for all": (ATEN.scaled_dot_product_attention.default, True),
    "aten, written out": (ATEN._scaled_dot_product_attention_math.default, True),
    "aten, flash attention": (ATEN._scaled_dot_product_flash_attention_for_cpu.default, True),
    "flash-attn": (torch.ops.hdi_tests.flash_attn.default, False),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_attention_operators_are_recorded_with_their_heads_and_lengths(name):
    model, x = ByOperator(*OPERATORS[name]), torch.randn(B, T, 16)
    (core,) = observed(model, lambda: model(x)).cores
    assert (core.heads, core.queries, core.keys, core.width) == (4, T, T, 4)


@pytest.mark.parametrize("way", ["transposed", "fused_and_grouped"])
def test_attention_on_an_empty_batch_is_unread_with_that_reason(way):
    model = nn.Sequential(ByHand(way))
    (core,) = observed(model, lambda: model(torch.randn(0, T, 16))).cores
    assert core.rows is None
    assert core.unread == "it ran on no tokens: the batch is empty"


def test_attention_under_data_parallel_is_observed_only_if_the_model_is_not_replicated():
    model, x = nn.DataParallel(nn.Sequential(ByHand("transposed"))), torch.randn(B, T, 16)
    model.device_ids = []  # as on a machine without accelerators
    observer = observed(model, lambda: model(x))
    assert observer.closed == {}
    assert [core.heads for core in observer.cores] == [4]
    model.device_ids = [0, 1]
    assert "copies of it in other threads" in str(closed_reason(model))


def test_positions_gathered_under_vmap_are_not_followed_and_nothing_fails():
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x):
            def one_sequence(x):
                places = torch.arange(T)[:, None].expand(T, 4).clone()
                turned = torch.arange(20.0)[:, None].expand(20, 4).gather(0, places).split(2, -1)
                q, k, v = (part.unflatten(-1, (4, 4)).transpose(0, 1) for part in self.qkv(x).chunk(3, -1))
                q = q * torch.cat(turned, -1).cos()
                return ((q @ k.mT / 2).softmax(-1) @ v).transpose(0, 1).flatten(1)

            return self.out(torch.vmap(one_sequence)(x))

    model = nn.Sequential(Mapped())
    observer = observed(model, lambda: model(torch.randn(B, T, 16)))
    assert observer.failures == []
    assert [core.rows for core in observer.cores] == [None]
