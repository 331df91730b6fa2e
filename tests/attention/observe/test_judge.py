"""The inputs of attention decide whether the heads that a layer claims are right; the layers here claim wrong ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hdi_callback import find_attention
from hdi_callback.attention import AttentionLayer, HeadSlice
from hdi_callback.attention.observe import AttentionObserver
from tests.attention import models
from tests.attention.sweep.architectures import variants

B, T, D, H = 3, 7, 32, 4


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return self.inner(*args)


def separate(module, heads=H, groups=None, width=8, names=("q_proj", "k_proj", "v_proj", "out_proj"), **strides):
    counts = (heads, groups or heads, groups or heads, heads)
    roles = ("query", "key", "value", "output")
    slices = {
        role: HeadSlice(module, f"{name}.weight", count, width, **(strides if role != "output" else {}))
        for role, name, count in zip(roles, names, counts, strict=True)
    }
    return AttentionLayer("inner", module, heads, groups or heads, width, width, "said", slices)


def fused(module, name="c_attn", output="c_proj", step=D, stride=None):
    slices = {
        role: HeadSlice(module, f"{name}.weight", H, 8, start=place * step, stride=stride)
        for place, role in enumerate(("query", "key", "value"))
    }
    slices["output"] = HeadSlice(module, f"{output}.weight", H, 8)
    return AttentionLayer("inner", module, H, H, 8, 8, "said", slices)


def observed(inner, claim, *inputs) -> AttentionObserver:
    model = Around(inner).train()
    observer = AttentionObserver(model, [] if claim is None else [claim])
    observer.arm()
    model(*(inputs or (torch.randn(B, T, D),)))
    observer.disarm()
    assert observer.failures == []
    return observer


def built(module, **options):
    torch.manual_seed(0)
    return module(**options)


RIGHT = {
    "separate maps, length first": (models.LengthFirst, separate),
    "fused": (models.NanoGPT, fused),
    "tokens in one dimension": (models.OneRowPerToken, fused),
    "interleaved": (models.Interleaved, lambda module: fused(module, "qkv_proj", "o_proj", 8, 24)),
    "grouped": (
        models.Grouped,
        lambda module: separate(module, groups=2, names=("q_proj", "k_proj", "v_proj", "o_proj")),
    ),
    "strided, and said so": (models.Strided, lambda module: separate(module, stride=1, step=4)),
}


@pytest.mark.parametrize("case", RIGHT)
def test_right_claims_are_established_by_observation(case):
    kind, claim = RIGHT[case]
    inner = built(kind)
    verdict = observed(inner, claim(inner)).verdicts()["inner"]
    assert verdict.state == "established", verdict.sentence
    assert {role: one.state for role, one in verdict.roles.items()} == dict.fromkeys(
        ("query", "key", "value", "output"), "established"
    )


WRONG = {
    "strided": (models.Strided, separate, "its keys are rows 0, 4, 8, 12, ..."),
    "twice as many": (
        models.TwiceAsMany,
        separate,
        "attention takes 8 heads of 4 features as keys, but the layer claims 4 of 8",
    ),
    "half as many": (
        models.HalfAsMany,
        separate,
        "attention takes 2 heads of 16 features as keys, but the layer claims 4 of 8",
    ),
    "keys first": (models.KeysFirst, fused, "its keys are rows 0 to 7; 8 to 15, ... of `inner.c_attn.weight`"),
    "values first": (models.ValuesFirst, fused, "its values are rows 0 to 7"),
    "neighbours' keys": (models.KeysRolled, separate, "head 0 attends with the keys of claimed head 3"),
    "groups tiled": (
        models.GroupsTiled,
        lambda module: separate(module, groups=2, names=("q_proj", "k_proj", "v_proj", "o_proj")),
        "head 1 attends with the keys of claimed head 1, not of head 0",
    ),
    "outputs in another order": (
        models.OutputsInAnotherOrder,
        fused,
        "the outputs of head 0 are columns 0, 4, 8, 12, ... of `inner.c_proj.weight`, but the layer claims 0 to 7",
    ),
    "swapped by name": (
        models.Separate,
        lambda module: separate(module, names=("k_proj", "q_proj", "v_proj", "out_proj")),
        "its keys come from `inner.k_proj.weight`, but the layer claims `inner.q_proj.weight`",
    ),
}


class Plain(models.Separate):
    def forward(self, x):
        return self.out_proj(models.attend(*self.heads(x)))


@pytest.mark.parametrize("case", WRONG)
def test_wrong_claims_are_contradicted_by_observation(case):
    kind, claim, said = WRONG[case]
    inner = built(Plain if kind is models.Separate else kind)
    verdict = observed(inner, claim(inner)).verdicts()["inner"]
    assert verdict.state == "contradicted", verdict.sentence
    assert said in verdict.sentence


@pytest.mark.parametrize("kind", [models.TokensMixed, models.ValuesSquashed, models.OverChannels])
def test_heads_that_are_no_features_of_the_linear_map_stay_undecided(kind):
    inner = built(kind)
    claim = fused(inner) if kind is models.OverChannels else separate(inner)
    observer = observed(inner, claim)
    assert observer.verdicts()["inner"].state == "undecided"


class MixesKeys(models.Separate):
    """A parameter says how much every position hands on of what another one draws."""

    def __init__(self) -> None:
        super().__init__()
        self.over = nn.Parameter(torch.randn(T, T))

    def forward(self, x):
        q, k, v = (one.transpose(1, 2) for one in self.heads(x))
        return self.out_proj(((q @ k.mT).softmax(-1) @ self.over @ v).transpose(1, 2).flatten(2))


class SumsHeads(models.Separate):
    """The heads are added up, over two dimensions at once."""

    def forward(self, x):
        q, k, v = self.heads(x)
        weights = torch.einsum("bihd,bjhd->bihj", q, k).softmax(-1)
        return F.linear(torch.einsum("bihj,bjhd->bid", weights, v), self.out_proj.weight[:, :8])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (MixesKeys, "its scores or weights are mixed by `matmul`"),
        (SumsHeads, "no attention was observed in its module"),
    ],
)
def test_weights_that_mix_heads_or_do_not_average_the_values_leave_the_claim_undecided(kind, reason):
    inner = built(kind)
    verdict = observed(inner, separate(inner)).verdicts()["inner"]
    assert (verdict.state, verdict.sentence) == ("undecided", reason)


class OneByOne(nn.Module):
    """A map and an attention for each head; `bent` is one whose keys are not the output of its projection."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.ModuleList(nn.Linear(D, 8) for _ in range(H)) for _ in range(3))
        self.o = nn.Linear(D, D)
        self.bent: int | None = None

    def forward(self, x):
        heads = []
        for number, (q, k, v) in enumerate(zip(self.q, self.k, self.v)):
            key = k(x).tanh() if number == self.bent else k(x)
            heads.append(F.scaled_dot_product_attention(q(x), key, v(x)))
        return self.o(torch.cat(heads, -1))


@pytest.mark.parametrize("bent", [None, 0, 2])
def test_heads_computed_one_by_one_are_established_only_if_all_of_them_match(bent):
    inner = built(OneByOne)
    (claim,) = find_attention(Around(inner))
    inner.bent = bent
    verdict = observed(inner, claim).verdicts()["inner"]
    assert verdict.roles["query"].state == "established"
    if bent is None:
        assert verdict.state == "established", verdict.sentence
    else:
        assert verdict.state == "undecided"
        assert verdict.sentence == f"the keys of head {bent} of 4 are not the output of its projection"


class Rotary(models.Separate):
    """Rotary positions of several kinds, over a part of the features."""

    def __init__(self, kind: str, part: int = 8) -> None:
        super().__init__()
        self.kind, self.part = kind, part

    def turned(self, x):
        x, rest = x[..., : self.part], x[..., self.part :]
        half = self.part // 2
        angle = (torch.arange(x.shape[1])[:, None, None] * torch.logspace(0, -2, half)).to(x)
        first, second = (x[..., :half], x[..., half:]) if self.kind == "halves" else (x[..., ::2], x[..., 1::2])
        first, second = first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()
        x = torch.cat([first, second], -1) if self.kind == "halves" else torch.stack([first, second], -1).flatten(-2)
        return torch.cat([x, rest], -1)

    def forward(self, x):
        q, k, v = self.heads(x)
        return self.out_proj(models.attend(self.turned(q) * 3, self.turned(k), v))


@pytest.mark.parametrize("part", [8, 4])
@pytest.mark.parametrize("kind", ["halves", "neighbours"])
def test_rotary_heads_are_established_and_shifted_claims_are_not(kind, part):
    inner = built(Rotary, kind=kind, part=part)
    claim = separate(inner)
    assert observed(inner, claim).verdicts()["inner"].state == "established"
    slices = {**claim.slices, "key": replace(claim.slices["key"], start=4, heads=3)}
    shifted = replace(claim, num_key_heads=3, slices=slices)
    assert observed(inner, shifted).verdicts()["inner"].state != "established"


class Normed(models.Separate):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.q_norm, self.k_norm = (nn.RMSNorm(D if way == "over all heads" else 8) for _ in range(2))
        for norm in (self.q_norm, self.k_norm):
            nn.init.uniform_(norm.weight, 0.5, 1.5)

    def forward(self, x):
        q, k, v = self.heads(x)
        if self.way == "over all heads":
            q, k = (norm(one.flatten(2)).view_as(one) for norm, one in ((self.q_norm, q), (self.k_norm, k)))
        elif self.way == "by function":
            q, k = F.normalize(q, dim=-1) * 4, F.normalize(k, dim=-1)
        else:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.way == "of each head, then turned":
            turn = Rotary("halves").turned
            q, k = turn(q), turn(k)
        return self.out_proj(models.attend(q, k, v))


@pytest.mark.parametrize("way", ["of each head", "of each head, then turned", "over all heads", "by function"])
def test_heads_after_a_norm_are_established(way):
    inner = built(Normed, way=way)
    verdict = observed(inner, separate(inner)).verdicts()["inner"]
    assert verdict.state == "established", verdict.sentence
    assert "through `inner" in verdict.roles["key"].sentence or "normed" in verdict.roles["key"].sentence


class TwoStreams(nn.Module):
    """Joint attention: text and image have maps of their own, and attend together."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = H
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(D, D) for _ in range(4))
        self.add_q, self.add_k, self.add_v = (nn.Linear(D, D) for _ in range(3))

    def forward(self, image, text):
        one = [proj(image).unflatten(-1, (H, 8)) for proj in (self.q_proj, self.k_proj, self.v_proj)]
        two = [proj(text).unflatten(-1, (H, 8)) for proj in (self.add_q, self.add_k, self.add_v)]
        out = models.attend(*(torch.cat(pair, 1) for pair in zip(one, two, strict=True)))
        return self.out_proj(out[:, : image.shape[1]])


def test_keys_of_a_second_stream_are_reported_as_partly_unexplained():
    inner = built(TwoStreams)
    observer = observed(inner, separate(inner), torch.randn(B, T, D), torch.randn(B, 4, D))
    (one,) = observer.unexplained()
    assert one.layer == "inner"
    assert one.reason.endswith(f"its projections compute {T} of the {T + 4} tokens that are attended to")


class TwoInOne(Plain):
    """A second attention beside the one that is claimed, with weights that are bare parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Parameter(torch.randn(H, D, 8) / 6) for _ in range(3))

    def forward(self, x):
        q, k, v = (torch.einsum("btd,hdk->bhtk", x, one) for one in (self.query, self.key, self.value))
        weights = torch.einsum("bhtk,bhsk->bhts", q, k).softmax(-1)
        return super().forward(x) + torch.einsum("bhts,bhsk->bthk", weights, v).flatten(2)


def test_a_second_attention_by_other_projections_is_reported_as_unexplained():
    inner = built(TwoInOne)
    observer = observed(inner, separate(inner))
    (one,) = observer.unexplained()
    assert one.layer == "inner"
    assert (
        one.reason == "`inner` covers a part of it: it computes another attention too, whose keys come from `inner.key`"
    )


class HalfOfTheHeads(nn.Module):
    """One map, of which two heads attend within a sequence and two over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        one, other = self.qkv(x).view(B, T, 3, 4, D // 4).chunk(2, dim=3)
        first = models.attend(*one.unbind(2))
        second = models.attend(*(part.transpose(0, 1) for part in other.unbind(2))).transpose(0, 1)
        return self.out(torch.cat([first, second], -1))


def test_a_second_attention_by_other_rows_of_the_same_projection_is_reported_as_unexplained():
    inner, width = built(HalfOfTheHeads), D // 4
    slices = {
        role: HeadSlice(inner, "qkv.weight", 2, width, start=number * D)
        for number, role in enumerate(("query", "key", "value"))
    }
    layer = AttentionLayer("inner", inner, 2, 2, width, width, "fused", slices)
    observer = observed(inner, layer)
    assert observer.verdicts()["inner"].state == "established"
    (one,) = observer.unexplained()
    assert one.layer == "inner"
    assert one.reason.endswith("it computes another attention too, whose keys come from `inner.qkv.weight`")


class Additive(models.Separate):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(D, 1)

    def forward(self, x):
        q, k, v = (proj(x) for proj in (self.q_proj, self.k_proj, self.v_proj))
        weights = self.score(torch.tanh(q[:, :, None] + k[:, None])).squeeze(-1).softmax(-1)
        return self.out_proj(weights @ v)


class Gated(models.Separate):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        q, k, v = (one.transpose(1, 2) for one in self.heads(x))
        return self.out_proj((self.function(q @ k.mT / 3) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("inner", "kind", "unread"),
    [
        (Additive, "additive", "its softmax is of scores that are not a product of two activations"),
        (lambda: Gated(torch.sigmoid), "sigmoid", "its weights are not a softmax (sigmoid)"),
        (lambda: Gated(F.relu), "relu", "its weights are not a softmax (relu)"),
        (lambda: Gated(lambda scores: scores), "linear", "its weights are not a softmax (linear)"),
    ],
)
def test_attention_without_softmax_weights_is_reported_with_its_kind_and_not_read(inner, kind, unread):
    observer = AttentionObserver(Around(built(inner)), reduce_rows=lambda chunk: chunk.weights)
    observer.arm()
    observer._model(torch.randn(B, T, D))
    observer.disarm()
    assert [(one.kind, one.unread, one.rows) for one in observer.cores] == [(kind, unread, None)]


@pytest.mark.parametrize(
    ("kind", "claim"),
    [
        (models.Strided, lambda module: separate(module, stride=1, step=4)),
        (models.NanoGPT, fused),
        (models.Interleaved, lambda module: fused(module, "qkv_proj", "o_proj", 8, 24)),
        (models.TwiceAsMany, lambda module: separate(module, 8, width=4)),
        (lambda: Rotary("halves"), separate),
    ],
)
def test_heads_without_a_claim_are_proposed_from_observation(kind, claim):
    inner = built(kind)
    expected = claim(inner)
    (found,) = observed(inner, None).proposals().values()
    assert isinstance(found, AttentionLayer), found
    assert (found.num_heads, found.num_key_heads, found.head_dim) == (
        expected.num_heads,
        expected.num_key_heads,
        expected.head_dim,
    )
    for role in ("query", "key", "value", "output"):
        assert torch.equal(found.weight(role), expected.weight(role)), role


class OfTwoStreams(models.Separate):
    def forward(self, x, memory):
        heads = self.q_proj(x), self.k_proj(memory), self.v_proj(memory)
        return self.out_proj(models.attend(*(one.unflatten(-1, (H, -1)) for one in heads)))


@pytest.mark.parametrize("keys", [4, 11])
def test_heads_without_a_claim_are_proposed_with_more_or_fewer_queries_than_keys(keys):
    inner = built(OfTwoStreams)
    (found,) = observed(inner, None, torch.randn(B, T, D), torch.randn(B, keys, D)).proposals().values()
    assert isinstance(found, AttentionLayer), found
    expected = separate(inner)
    for role in ("query", "key", "value", "output"):
        assert torch.equal(found.weight(role), expected.weight(role)), role


@pytest.mark.some_slow(quick=3)
@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2", "gemma2", "deepseek_v3", "gpt_bigcode", "bart", "gpt2"])
def test_layers_of_transformers_are_established_in_training(family):
    torch.manual_seed(0)
    model = next(variants(family)).train()
    layers = find_attention(model)
    observer = AttentionObserver(model, layers)
    observer.arm()
    model(input_ids=torch.randint(5, 50, (B, T)))
    observer.disarm()
    verdicts = observer.verdicts()
    assert {name: one.sentence for name, one in verdicts.items() if one.state != "established"} == {}
    assert len(verdicts) == len(layers) > 0
    assert observer.unexplained() == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_heads_are_established_in_every_type_of_number(dtype):
    inner = built(Rotary, kind="halves").to(dtype)
    assert (
        observed(inner, separate(inner), torch.randn(B, T, D, dtype=dtype)).verdicts()["inner"].state == "established"
    )


def test_heads_that_collapsed_into_one_are_not_contradicted():
    """A collapse must not be taken for a contradiction: heads of equal weights cannot be told apart."""
    inner = built(Plain)
    with torch.no_grad():
        for proj in (inner.q_proj, inner.k_proj, inner.v_proj):
            for one in (proj.weight, proj.bias):
                one.copy_(one[:8].repeat(H, *[1] * (one.dim() - 1)))
    assert observed(inner, separate(inner)).verdicts()["inner"].state == "established"


def test_a_layer_that_did_not_run_stays_undecided_with_that_reason():
    model = Around(nn.ModuleDict({"one": Plain(), "other": Plain()}))
    model.forward = lambda x: model.inner["one"](x)
    claims = [replace(separate(model.inner[name]), name=f"inner.{name}") for name in ("one", "other")]
    observer = AttentionObserver(model, claims)
    observer.arm()
    model(torch.randn(B, T, D))
    observer.disarm()
    assert {name: one.state for name, one in observer.verdicts().items()} == {
        "inner.one": "established", "inner.other": "undecided",
    }  # fmt: skip
    assert observer.verdicts()["inner.other"].sentence == "no attention was observed in its module"


def test_judging_reads_no_value_on_the_host_during_a_forward():
    """A tensor on the meta device has no numbers: whoever asks for one fails."""
    model = Around(Rotary("halves")).to("meta")
    observer = AttentionObserver(
        model, [separate(model.inner)], reduce_rows=lambda chunk: chunk.weights.sum(), reduce_norms=lambda x, _: x.sum()
    )
    observer.arm()
    with torch.device("meta"):
        model(torch.randn(B, T, D, device="meta"))
    observer.disarm()
    assert observer.failures == []
    assert [core.unread for core in observer.cores] == [""]


class ManyExperts(nn.Module):
    """So many maps between two attentions that not all can be kept."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Plain(), Plain()
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(30))

    def forward(self, x):
        x = self.one(x)
        for _ in range(120):
            for expert in self.experts:
                x = expert(x)
        return self.other(x)


def test_linear_maps_of_many_experts_do_not_evict_those_of_claimed_layers():
    inner = built(ManyExperts)
    claims = [replace(separate(getattr(inner, name)), name=f"inner.{name}") for name in ("one", "other")]
    model = Around(inner)
    observer = AttentionObserver(model, claims)
    observer.arm()
    model(torch.randn(B, T, D))
    observer.disarm()
    assert {one.state for one in observer.verdicts().values()} == {"established"}
    assert len(observer._forward.recorder.maps.calls) < 1500


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(D, H, batch_first=True)

    def forward(self, x):
        return self.attn(x, x, x, need_weights=False)[0]


@pytest.fixture
def _one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("kind", [Plain, Packed])
def test_heads_of_sharded_parameters_are_established(kind):
    from torch.distributed.fsdp import fully_shard

    model = Around(built(kind)).train()
    fully_shard(model.inner)
    fully_shard(model)
    layers = find_attention(model, forward=lambda: model(torch.randn(B, T, D)))
    assert len(layers) == 1
    observer = AttentionObserver(model, layers, reduce_rows=lambda chunk: chunk.weights.sum())
    observer.arm()
    model(torch.randn(B, T, D))
    observer.disarm()
    (verdict,) = observer.verdicts().values()
    assert verdict.state == "established", verdict.sentence
    assert observer.absent == {}
    assert float(observer.cores[0].rows) == pytest.approx(B * T * H, rel=1e-4)


def test_heads_of_adapters_are_those_of_base_and_update_together():
    import peft

    torch.manual_seed(0)
    model = next(variants("llama")).train()
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], r=2))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    layers = find_attention(adapted)
    observer = AttentionObserver(adapted, layers)
    observer.arm()
    adapted(input_ids=torch.randint(5, 50, (B, T)))
    observer.disarm()
    assert {name: one.sentence for name, one in observer.verdicts().items() if one.state != "established"} == {}
    assert len(layers) == 2
