"""The judge of the sweep catches every wrong claim that looks right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from einops import rearrange
from torch import nn

from hdi_callback.attention import find_attention
from tests.attention import models as by_hand
from tests.attention.models import D, H
from tests.attention.sweep.changes import each_head_changes_alone
from tests.attention.sweep.judge import Claim, Finding, claim_of, determined, heads_of, is_over_features, judge, merged
from tests.attention.witness import witness

B, T = 41, 6


def claimed_by_rows(module: nn.Module, rows: dict[str, torch.Tensor], heads: int = H, width: int = 8) -> Claim:
    """A claim from the rows of each role; the output projection is left out."""

    def weight(role: str) -> torch.Tensor:
        return rows[role].view(-1, width, rows[role].shape[-1])

    return Claim(module, heads, len(rows["key"]) // width, width, width, weight, None, frozenset(rows))


def judged(module: nn.Module, claim: Claim) -> Finding:
    with torch.no_grad(), witness(module) as observed:
        module(torch.randn(B, T, D, generator=torch.Generator().manual_seed(0)))
    findings = [judge(claim, observed, computation, B) for computation in merged(observed.computations, B)]
    return max(findings, key=lambda finding: {True: 0, None: 1, False: 2}[finding.is_right])  # the worst of its parts


def thirds(module: nn.Module, name: str) -> dict[str, torch.Tensor]:
    return dict(zip(("query", "key", "value"), getattr(module, name).weight.detach().chunk(3)))


def by_head(module: nn.Module) -> dict[str, torch.Tensor]:
    parts = module.qkv_proj.weight.detach().view(H, 3, 8, D)
    return {role: parts[:, i].flatten(0, 1) for i, role in enumerate(("query", "key", "value"))}


def test_a_right_claim_is_right():
    torch.manual_seed(0)
    module = by_hand.NanoGPT().eval()
    (layer,) = find_attention(nn.Sequential(module))
    finding = judged(module, claim_of(layer))
    assert finding == Finding(True, heads=4, key_heads=4, key_width=8, value_width=8)
    assert judged(module, claimed_by_rows(module, thirds(module, "c_attn"))).is_right


def test_interleaved_heads_read_as_contiguous_are_wrong():
    torch.manual_seed(0)
    module = by_hand.Interleaved()
    finding = judged(module, claimed_by_rows(module, thirds(module, "qkv_proj")))
    assert finding.is_right is False
    assert "received" in finding.reason or "receives as key" in finding.reason
    assert judged(module, claimed_by_rows(module, by_head(module))).is_right


def test_contiguous_heads_read_as_interleaved_are_wrong():
    torch.manual_seed(0)
    module = by_hand.NanoGPT().eval()
    module.qkv_proj = module.c_attn
    assert judged(module, claimed_by_rows(module, by_head(module))).is_right is False


@pytest.mark.parametrize("swapped", [("key", "value"), ("query", "key"), ("query", "value")], ids="-".join)
def test_swapped_roles_are_wrong(swapped):
    torch.manual_seed(0)
    module = by_hand.NanoGPT().eval()
    rows = thirds(module, "c_attn")
    one, other = swapped
    rows[one], rows[other] = rows[other], rows[one]
    assert judged(module, claimed_by_rows(module, rows)).is_right is False


@pytest.mark.parametrize("role", ["query", "key", "value"])
def test_permuted_heads_of_one_role_are_wrong(role):
    torch.manual_seed(0)
    module = by_hand.NanoGPT().eval()
    rows = thirds(module, "c_attn")
    rows[role] = rows[role].view(H, 8, D)[[1, 0, 2, 3]].flatten(0, 1)
    finding = judged(module, claimed_by_rows(module, rows))
    assert finding.is_right is False
    assert f"the claimed {role} heads" in finding.reason


def test_heads_shifted_by_one_row_are_wrong():
    torch.manual_seed(0)
    module = by_hand.NanoGPT().eval()
    rows = thirds(module, "c_attn")
    rows["key"] = rows["key"].roll(1, 0)  # each head has one row of its neighbour
    assert judged(module, claimed_by_rows(module, rows)).is_right is False


@pytest.mark.parametrize(("heads", "width"), [(2, 16), (8, 4)])
def test_another_number_of_heads_is_wrong(heads, width):
    torch.manual_seed(0)
    module = by_hand.NanoGPT().eval()
    finding = judged(module, claimed_by_rows(module, thirds(module, "c_attn"), heads, width))
    assert finding.is_right is False
    assert finding.reason == f"it claims {heads} heads, attention has 4"


def test_groups_in_another_order_are_wrong():
    torch.manual_seed(0)
    module, tiled = by_hand.Grouped(), by_hand.GroupsTiled()
    for one in (module, tiled):
        rows = {
            role: getattr(one, f"{role[0]}_proj").weight.detach() for role in ("query", "key", "value")
        }  # fmt: skip
        finding = judged(one, claimed_by_rows(one, rows))
        assert finding.is_right is (one is module)
    assert finding.key_heads != 2  # repeated in tiles, they are not told from as many of their own


class ContractedGroups(nn.Module):
    """Heads in groups, contracted with their shared keys: places in groups and positions are one dimension then."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(D, 8 * H), nn.Linear(D, 16), nn.Linear(D, 16)

    def forward(self, x):
        q = self.query(x).unflatten(-1, (2, H // 2, 8)).permute(0, 3, 2, 1, 4)  # (b, place, group, i, d)
        k, v = (part(x).unflatten(-1, (2, 8)).transpose(1, 2) for part in (self.key, self.value))
        weights = torch.einsum("bpgid,bgjd->bpgij", q, k).softmax(-1)
        return torch.einsum("bpgij,bgjd->bpgid", weights, v)


def test_groups_whose_places_share_a_dimension_with_positions_are_right_only_in_their_order():
    torch.manual_seed(0)
    module = ContractedGroups()
    rows = {role: getattr(module, role).weight.detach() for role in ("query", "key", "value")}
    assert judged(module, claimed_by_rows(module, rows)).is_right
    by_place = rows["query"].unflatten(0, (2, H // 2, 8)).transpose(0, 1).flatten(0, 2)
    others = [("query", by_place), *((role, rows[role].roll(8, 0)) for role in rows)]
    for role, of_others in others:
        assert judged(module, claimed_by_rows(module, rows | {role: of_others})).is_right is False, role


def test_heads_claimed_in_the_order_of_their_key_heads_are_compared_in_that_order():
    torch.manual_seed(0)
    module = by_hand.GroupsTiled()
    claim = claim_of(find_attention(nn.Sequential(module))[0])
    assert claim.order == (0, 2, 1, 3)
    assert judged(module, claim).is_right
    assert "output" in claim.roles
    for order in ((), (0, 1, 2, 3), (2, 0, 1, 3), (0, 2, 3, 1)):
        assert judged(module, replace(claim, order=order)).is_right is False


def test_a_wrong_output_weight_or_projection_is_wrong():
    torch.manual_seed(0)
    module = by_hand.NanoGPT().eval()
    claim = claim_of(find_attention(nn.Sequential(module))[0])
    turned = replace(claim, weight=lambda role: claim.weight(role).flip(0) if role == "output" else claim.weight(role))
    assert "output weight" in judged(module, turned).reason
    shuffled = by_hand.OutputsInAnotherOrder()
    rows = thirds(shuffled, "c_attn") | {"output": shuffled.c_proj.weight.detach().mT}
    claim = Claim(shuffled, H, H, 8, 8, lambda role: rows[role].view(H, 8, D), shuffled.c_proj)
    assert "side by side" in judged(shuffled, claim).reason


def test_a_head_is_determined_under_norm_bias_rotation_and_scale_and_not_under_mixing():
    g = torch.Generator().manual_seed(0)
    u = torch.randn(B, H, 8, generator=g, dtype=torch.float64)
    bias = torch.randn(H, 8, generator=g, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(8, 8, generator=g, dtype=torch.float64)).Q
    factor = torch.rand(B, 1, 1, generator=g, dtype=torch.float64) + 0.1
    normed = (u + bias) / (u + bias).square().mean(-1, keepdim=True).sqrt() * torch.rand(8, dtype=torch.float64)
    for actual in (u @ turn + bias, normed @ turn, factor * (u @ turn)):
        residual = determined(actual, u)
        assert float(residual.diagonal().max()) < 1e-6
        assert float((residual + 9 * torch.eye(H)).min()) > 0.05
    mixed = u + 0.1 * u.roll(1, 1)
    assert float(determined(mixed, u).diagonal().min()) > 0.02


def test_queries_and_keys_are_recorded_for_every_way_to_multiply_them():
    """A product, a batched one, a sum over letters, and torch's function give the same computation."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, H, T, 8, generator=g) for _ in range(3))

    class Attend(nn.Module):
        def __init__(self, way):
            super().__init__()
            self.way = way

        def forward(self, q, k, v):
            if self.way == "matmul":
                return (q @ k.mT).softmax(-1) @ v
            if self.way == "bmm":
                q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))
                return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)), dim=-1), v)
            if self.way == "einsum":
                weights = nn.functional.softmax(torch.einsum("bhid,bhjd->bhij", q, k), dim=-1)
                return torch.einsum("bhij,bhjd->bhid", weights, v)
            if self.way == "dots":
                q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
                weights = torch.einsum("...qhd,...khd->...hqk", q, k).softmax(-1)
                return torch.einsum("...hqk,...khd->...qhd", weights, v)
            if self.way == "turned":  # channels first, weights on the right
                return v.mT @ torch.softmax(q @ k.mT, -1).mT
            return nn.functional.scaled_dot_product_attention(q, k, v, scale=1.0)

    for way in ("matmul", "bmm", "einsum", "dots", "turned", "sdpa"):
        module = Attend(way)
        with witness(module) as observed:
            module(q, k, v)
        (one,) = observed.computations
        for expected, got in ((q, one.query), (k, one.key), (v, one.value)):
            assert torch.equal(got.reshape(expected.shape), expected), way
        expected = (q @ k.mT).softmax(-1) @ v
        assert torch.allclose(one.output.reshape(expected.shape), expected, atol=1e-5), way
        assert heads_of(one, B, T + 1) == H, way


def test_query_heads_that_share_one_key_head_are_counted():
    """As `attn_one_kv_head` of x-transformers multiplies them: no dim of the keys numbers heads."""
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(B, H, T, 8, generator=g), *(torch.randn(B, T, 8, generator=g) for _ in range(2))

    class OneKeyHead(nn.Module):
        def forward(self, q, k, v):
            weights = torch.einsum("bhid,bjd->bhij", q, k).softmax(-1)
            return torch.einsum("bhij,bjd->bhid", weights, v)

    module = OneKeyHead()
    with witness(module) as observed:
        module(q, k, v)
    (one,) = observed.computations
    assert heads_of(one, B, T + 1) == H


def test_heads_are_compared_beside_a_product_with_positions_of_any_size():
    """Positions that are as many as sequences, times something, belong to no sequence all the same."""
    places = torch.randn(H, B, 8, generator=torch.Generator().manual_seed(0))

    def with_positions(q, k, v):
        return (q @ k.mT + torch.einsum("bhid,hjd->bhij", q, places)[..., :T]).softmax(-1) @ v

    torch.manual_seed(0)
    module = Attend(with_positions)
    assert judged(module, whole(module)) == Finding(True, "", H, H, 8, 8)
    wrong = replace(whole(module), weight=lambda role: whole(module).weight(role).flip(0))
    assert judged(module, wrong).is_right is False


class TiedRows(nn.Module):
    """The rows of an alignment attend with one map of weights, of scores that are summed over them."""

    def __init__(self, scores, sums):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.scores, self.sums = scores, sums

    def forward(self, x):
        q, k, v = (m(x).unflatten(-1, (H, 8)) for m in (self.q, self.k, self.v))
        weights = torch.einsum(self.scores, q / (3 * 8) ** 0.5, k).softmax(-1)
        return self.o(torch.einsum(self.sums, weights, v).flatten(-2))


@pytest.mark.parametrize("is_first", [True, False])
def test_scores_summed_over_rows_are_compared_row_by_row(is_first):
    torch.manual_seed(0)
    ways = ("rinhd,rjnhd->hnij", "hnij,rjnhd->rinhd"), ("brihd,brjhd->bhij", "bhij,brjhd->brihd")
    module = TiedRows(*ways[not is_first])
    x = torch.randn(3, T, B, D) if is_first else torch.randn(B, 3, T, D)
    with witness(module) as observed:
        module(x)
    (one,) = observed.computations
    order = "r n b h d -> r b h n d" if is_first else "b r n h d -> r b h n d"
    actual = [rearrange(m(x).unflatten(-1, (H, 8)), order) for m in (module.q, module.k, module.v)]
    written_as = [rearrange(one, "r h b n d -> r b h n d") if is_first else one for one in
               (one.query * 24**0.5, one.key, one.value, one.output)]  # fmt: skip
    # By hand: one map of weights, and what it gives to each row.
    scores = (actual[0] / 24**0.5 @ actual[1].mT).sum(0)
    outputs = scores.softmax(-1) @ actual[2]
    for mine, theirs in zip(written_as, (*actual, outputs)):
        assert torch.allclose(mine, theirs, atol=1e-5)
    assert heads_of(one, B, T + 1) == H
    maps = {"query": module.q, "key": module.k, "value": module.v}

    def weight(role):
        return maps[role].weight.view(H, 8, D) if role in maps else module.o.weight.mT.reshape(H, 8, D)

    claim = Claim(module, H, H, 8, 8, weight, module.o)
    assert judge(claim, observed, one, B).is_right
    for role in ("query", "key", "value", "output"):

        def swapped(name, role=role):
            return claim.weight(name).flip(0) if name == role else claim.weight(name)

        assert judge(replace(claim, weight=swapped), observed, one, B).is_right is False, role


def test_products_without_a_softmax_and_routers_are_not_recorded_as_attention():
    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.route, self.experts = nn.Linear(D, 4), nn.Parameter(torch.randn(4, D, D))

        def forward(self, x):
            share = self.route(x @ x.mT @ x).softmax(-1)
            return torch.einsum("bte,btd->bed", share, x)

    module = Router()
    with torch.no_grad(), witness(module) as observed:
        module(torch.randn(B, T, D))
    assert observed.computations == []


class Attend(nn.Module):
    """Attention by hand whose core can be replaced; queries, keys and values side by side as in `NanoGPT`."""

    def __init__(self, core, is_swapped=False):
        super().__init__()
        self.qkv, self.back, self.core, self.is_swapped = nn.Linear(D, 3 * D), nn.Linear(D, D), core, is_swapped

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (H, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        heads = self.core(q, k, v)
        return self.back((heads.flip(1) if self.is_swapped else heads).transpose(1, 2).flatten(2))


def whole(module: Attend) -> Claim:
    rows = thirds(module, "qkv") | {"output": module.back.weight.detach().mT}
    return Claim(module, H, H, 8, 8, lambda role: rows[role].view(H, 8, -1), module.back)


def softly(q, k, v):
    return (q @ k.mT).softmax(-1) @ v


def by_log_sums(q, k, v):
    scores = q @ k.mT
    return torch.exp(scores - scores.logsumexp(-1, keepdim=True)) @ v


def in_parts(q, k, v):
    weights = (q @ k.mT).softmax(-1)
    return weights[..., :2] @ v[:, :, :2] + weights[..., 2:] @ v[:, :, 2:]


def with_relative_values(q, k, v):
    weights = (q @ k.mT).softmax(-1)
    return weights @ v + weights @ torch.linspace(-1, 1, T * 8).view(T, 8)


def with_keys_from_elsewhere(q, k, v):
    other = torch.randn(k.shape, generator=torch.Generator().manual_seed(1))
    return softly(q, torch.cat([other, k], 2), torch.cat([other.flip(-1), v], 2))


def of_picked_queries(q, k, v):
    order = (q @ k.mT).amax(-1).topk(3, sorted=False).indices  # others in each sequence and head
    index = order[..., None].expand(-1, -1, -1, 8)
    found = softly(q.gather(2, index), k, v)
    return v.mean(2, keepdim=True).expand_as(v).scatter(2, index, found)


def of_longer_sequences(q, k, v):
    q, k, v = (torch.nn.functional.pad(part, (0, 0, 0, 3)) for part in (q, k, v))
    return softly(q, k, v)[:, :, :T]


CORES = [softly, by_log_sums, in_parts, with_relative_values, with_keys_from_elsewhere, of_picked_queries,
         of_longer_sequences]  # fmt: skip


@pytest.mark.some_slow(quick=3)
@pytest.mark.parametrize("core", CORES, ids=lambda core: core.__name__)
def test_attention_by_unusual_operations_is_judged_as_strictly(core):
    """Right claims are right; with swapped heads, roles, or outputs the same computation is judged wrong."""
    torch.manual_seed(0)
    module = Attend(core)
    claim = whole(module)
    assert judged(module, claim).is_right, judged(module, claim).reason
    for role in ("query", "key", "value"):
        swapped = replace(claim, weight=lambda r, role=role: claim.weight(r).flip(0) if r == role else claim.weight(r))
        assert judged(module, swapped).is_right is False, role
        cut = replace(claim, weight=lambda r, role=role: _rolled(claim.weight(r)) if r == role else claim.weight(r))
        assert judged(module, cut).is_right is False, role
    crossed = replace(claim, weight=lambda r: claim.weight({"key": "value", "value": "key"}.get(r, r)))
    assert judged(module, crossed).is_right is False
    shuffled = Attend(core, is_swapped=True)
    finding = judged(shuffled, whole(shuffled))
    assert finding.is_right is False
    assert "side by side" in finding.reason


def _rolled(weight: torch.Tensor) -> torch.Tensor:
    """Cut heads across each other by one row."""
    return weight.flatten(0, 1).roll(1, 0).view(weight.shape)


class Pool(nn.Module):
    """Attention whose queries are learned vectors, by hand and never given to each sequence."""

    def __init__(self):
        super().__init__()
        self.latent, self.q = nn.Parameter(torch.randn(1, 2, D)), nn.Linear(D, D)
        self.k, self.v, self.back = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (H, 8)).transpose(1, 2) for part in (self.q(self.latent), self.k(x), self.v(x)))
        return self.back(softly(q, k, v).transpose(1, 2).flatten(2))


def claimed_by_maps(module: nn.Module, **maps: nn.Module) -> Claim:
    rows = {role: one.weight.detach().flatten(1) for role, one in maps.items()}
    rows |= {"output": rows["output"].mT} if "output" in rows else {}
    heads = {role: one.view(H, 8, -1) for role, one in rows.items()}
    return Claim(module, H, H, 8, 8, heads.__getitem__, maps.get("output"), frozenset(maps))


def test_a_claim_without_queries_is_right_only_if_the_queries_are_learned():
    torch.manual_seed(0)
    pool = Pool()
    finding = judged(pool, claimed_by_maps(pool, key=pool.k, value=pool.v, output=pool.back))
    assert finding.is_right, finding.reason
    assert "the query is a learned vector" in finding.remarks
    assert judged(pool, claimed_by_maps(pool, key=pool.v, value=pool.k, output=pool.back)).is_right is False
    module = Attend(softly)
    claim = replace(whole(module), roles=frozenset({"key", "value", "output"}))
    finding = judged(module, claim)
    assert finding.is_right is False
    assert finding.reason == "its query is a map of its input, and no query weight is claimed"
    finding = judged(module, replace(claim, roles=frozenset({"query", "value"})))
    assert finding.is_right is False
    assert finding.reason == "it claims no key weight"


class OfPixels(nn.Module):
    """Attention of pixels; projections are convolutions."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.back = (nn.Conv2d(D, D, 1) for _ in range(4))

    def forward(self, x):
        image = x.mT.unflatten(-1, (2, -1))
        q, k, v = (one(image).flatten(2).unflatten(1, (H, 8)).mT for one in (self.q, self.k, self.v))
        return self.back(softly(q, k, v).mT.reshape(image.shape))


def test_projections_that_are_convolutions_are_compared_with_and_without_their_output():
    torch.manual_seed(0)
    module = OfPixels()
    maps = {"query": module.q, "key": module.k, "value": module.v}
    finding = judged(module, claimed_by_maps(module, **maps, output=module.back))
    assert finding == Finding(True, heads=4, key_heads=4, key_width=8, value_width=8)
    assert judged(module, claimed_by_maps(module, **maps)).remarks == ("no output weight",)
    wrong = claimed_by_maps(module, **(maps | {"value": module.k}), output=module.back)
    assert judged(module, wrong).is_right is False
    wrong = claimed_by_maps(module, **maps, output=module.back)
    turned = replace(wrong, weight=lambda role: wrong.weight(role).flip(0) if role == "output" else wrong.weight(role))
    assert "output weight" in judged(module, turned).reason


def test_attention_to_learned_memory_slots_is_not_recorded_as_attention_over_tokens():
    class Memory(nn.Module):
        def __init__(self):
            super().__init__()
            self.slots = nn.Parameter(torch.randn(1, 5, D))

        def forward(self, x):
            return (x @ self.slots.mT).softmax(-1) @ self.slots

    module = Memory()
    with torch.no_grad(), witness(module) as observed:
        module(torch.randn(B, T, D))
    assert observed.computations == []


class Features(nn.Module):
    """A softmax over the features of each head, with products over tokens; or over tokens, with the same maps."""

    def __init__(self, is_over_tokens):
        super().__init__()
        self.qkv, self.back, self.is_over_tokens = nn.Linear(D, 3 * D), nn.Linear(D, D), is_over_tokens

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (H, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        heads = softly(q, k, v) if self.is_over_tokens else softly(q.mT, nn.functional.normalize(k.mT, dim=-1), v.mT).mT
        return self.back(heads.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("is_over_tokens", [True, False], ids=["tokens", "features"])
def test_a_softmax_over_features_is_distinguished_from_one_over_tokens(is_over_tokens):
    torch.manual_seed(0)
    module = Features(is_over_tokens)
    with torch.no_grad(), witness(module) as observed:
        module(torch.randn(B, T, D))
    (one,) = observed.computations
    assert is_over_features(one, observed, B) is not is_over_tokens


def test_normed_values_in_four_dimensions_are_not_mistaken_for_an_image():
    """As in Gemma 4's vision tower: what its norm of values gives has four dims, tokens the second of them."""

    class NormedValues(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.back, self.norm = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.RMSNorm(8)

        def forward(self, x):
            q, k, v = (part.unflatten(-1, (H, 8)) for part in self.qkv(x).chunk(3, -1))
            heads = softly(q.transpose(1, 2), k.transpose(1, 2), self.norm(v).transpose(1, 2))
            return self.back(heads.transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    module = NormedValues()
    with torch.no_grad(), witness(module) as observed:
        module(torch.randn(B, T, D))
    (one,) = observed.computations
    assert not is_over_features(one, observed, B)


def test_swapped_heads_as_wide_as_their_input_are_not_judged_right():
    """Any map of one head's key is a map of another's, for both have all features of the input."""

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.maps = nn.ModuleList(nn.Linear(8, H * 8) for _ in range(3))

        def forward(self, x):
            q, k, v = (one(x[..., :8]).unflatten(-1, (H, 8)).transpose(1, 2) for one in self.maps)
            return softly(q, k, v).transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    module = Wide()
    rows = dict(zip(("query", "key", "value"), (one.weight.detach() for one in module.maps)))
    assert judged(module, claimed_by_rows(module, rows)).is_right
    for role in rows:
        swapped = rows | {role: rows[role].view(H, 8, 8)[[1, 0, 2, 3]].flatten(0, 1)}
        assert judged(module, claimed_by_rows(module, swapped)).is_right is not True, role


class Filtered(Attend):
    """Keys and values are filtered over time, feature by feature, as short convolutions do."""

    def __init__(self):
        super().__init__(None)
        self.taps = nn.Parameter(torch.randn(3, D))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        k, v = (sum(tap * part.roll(lag, 1) * (torch.arange(T) >= lag)[:, None] for lag, tap in enumerate(self.taps))
                for part in (k, v))  # fmt: skip
        q, k, v = (part.unflatten(-1, (H, 8)).transpose(1, 2) for part in (q, k, v))
        return self.back(softly(q, k, v).transpose(1, 2).flatten(2))


def test_keys_filtered_over_time_are_right_only_for_their_own_head():
    torch.manual_seed(0)
    module = Filtered()
    finding = judged(module, whole(module))
    assert finding.is_right, finding.reason
    assert "key: of several tokens" in finding.remarks
    claim = whole(module)
    for role in ("query", "key", "value"):
        swapped = replace(claim, weight=lambda r, role=role: claim.weight(r).flip(0) if r == role else claim.weight(r))
        assert judged(module, swapped).is_right is False, role
        cut = replace(claim, weight=lambda r, role=role: _rolled(claim.weight(r)) if r == role else claim.weight(r))
        assert judged(module, cut).is_right is False, role


class BesideAFilter(nn.Module):
    """The output projection takes the heads, and behind them what a filter gives, as ConvBERT's does."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.filter, self.o = nn.Linear(D, D), nn.Linear(2 * D, D)

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (H, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.o(torch.cat([softly(q, k, v).transpose(1, 2).flatten(2), self.filter(x).relu()], -1))


def fewer(q, k, v):
    """Linformer: a matrix over tokens makes few keys and values of many."""
    mix = torch.randn(2, 4, T, generator=torch.Generator().manual_seed(3))
    return softly(q, mix[0] @ k, mix[1] @ v)


def fewer_of_mixed_features(q, k, v):
    return fewer(q, k + 0.2 * k.roll(1, -1), v)


def test_keys_and_values_summed_over_tokens_are_right_only_for_their_own_head_and_features():
    torch.manual_seed(0)
    module = Attend(fewer)
    finding = judged(module, whole(module))
    assert finding.is_right
    assert set(finding.remarks) == {"key: sums over tokens", "value: sums over tokens"}
    for role in ("key", "value"):

        def swapped(name, role=role):
            return whole(module).weight(name).flip(0) if name == role else whole(module).weight(name)

        assert judged(module, replace(whole(module), weight=swapped)).is_right is False
    module.core = fewer_of_mixed_features
    assert judged(module, whole(module)).is_right is False


def test_an_output_projection_with_further_inputs_is_compared_in_the_columns_of_the_heads():
    torch.manual_seed(0)
    module = BesideAFilter()
    columns = module.o.weight.detach().mT
    rows = {role: getattr(module, role[0]).weight.detach() for role in ("query", "key", "value")}
    right = claimed_by_rows(module, rows | {"output": columns[:D]})
    assert judged(module, right).is_right, judged(module, right).reason
    for untrue in (columns[D:], columns[:D].flip(0), columns[1 : D + 1]):
        assert judged(module, claimed_by_rows(module, rows | {"output": untrue})).is_right is False


class AsksWhetherTheyAreOne(nn.Module):
    """Other rows where queries and keys are made of one tensor, as in speechbrain."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, query, key):
        same = query is key or torch.equal(query, key)
        mixed = self.qkv(key)
        q, k, v = mixed.unflatten(-1, (H, 24)).chunk(3, -1) if same else mixed.unflatten(-1, (3, H, 8)).unbind(-3)
        return self.o(softly(*(part.transpose(1, 2) for part in (q, k, v))).transpose(1, 2).flatten(2))


def test_identical_arguments_stay_identical_when_inputs_are_perturbed():
    torch.manual_seed(0)
    module = AsksWhetherTheyAreOne()
    parts = module.qkv.weight.detach().view(H, 3, 8, D)
    rows = {role: parts[:, i].flatten(0, 1) for i, role in enumerate(("query", "key", "value"))}
    x = torch.randn(B, T, D)
    with torch.no_grad(), witness(module, shake={module: 0.5}) as observed:
        module(x, x)
    (computation,) = merged(observed.computations, B)
    assert judge(claimed_by_rows(module, rows), observed, computation, B).is_right


class OneProductForBothStreams(nn.Module):
    """Scores of one product are turned, and weight the values of the other stream too, as in GroundingDINO."""

    def __init__(self, turn) -> None:
        super().__init__()
        for name in ("a", "b", "value_a", "value_b"):
            setattr(self, name, nn.Linear(D, D, bias=False))
        self.turn = turn

    def forward(self, x):
        y = x[:, :4] * torch.linspace(0.5, 2.0, D)
        parts = (self.a(x), self.b(y), self.value_a(x), self.value_b(y))
        a, b, value_a, value_b = (one.unflatten(-1, (H, -1)).transpose(1, 2) for one in parts)
        scores = a @ b.mT
        other = self.turn(scores)
        of_b = scores.softmax(-1) @ value_b
        of_a = (other - other.amax(-1, keepdim=True)).softmax(-1) @ value_a
        return of_a, of_b


@pytest.mark.parametrize(
    "turn",
    [lambda s: s.transpose(-1, -2), lambda s: s.transpose(3, 2), lambda s: s.mT, lambda s: s.permute(0, 1, 3, 2),
     lambda s: s.permute((0, 1, 3, 2)), lambda s: torch.swapaxes(s, 2, 3)],
)  # fmt: skip
def test_transposed_scores_belong_to_the_other_stream(turn):
    torch.manual_seed(0)
    module = OneProductForBothStreams(turn)
    rows = {name: one.weight.detach() for name, one in module.named_children()}
    claims = [
        claimed_by_rows(module, {"query": rows["a"], "key": rows["b"], "value": rows["value_b"]}),
        claimed_by_rows(module, {"query": rows["b"], "key": rows["a"], "value": rows["value_a"]}),
    ]
    with torch.no_grad(), witness(module) as observed:
        module(torch.randn(B, T, D, generator=torch.Generator().manual_seed(0)))
    computations = merged(observed.computations, B)
    # Each is explained by its own claim, and by no other.
    found = [[judge(claim, observed, one, B).is_right for claim in claims] for one in computations]
    assert found == [[True, False], [False, True]]


class RelativeValues(nn.Module):
    """Averages of learned values of relative positions are added to those of tokens, as in VITS."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.relative = nn.Parameter(torch.randn(1, T, D // H))

    def forward(self, x):
        q, k, v = (one.unflatten(-1, (H, -1)).transpose(1, 2).flatten(0, 1) for one in self.qkv(x).chunk(3, -1))
        weights = (q @ k.mT).softmax(-1)
        out = torch.bmm(weights, v)
        out += torch.matmul(weights, self.relative)
        return out


def test_averaged_learned_values_are_part_of_the_attention_output():
    torch.manual_seed(0)
    module = RelativeValues()
    with torch.no_grad(), witness(module) as observed:
        answer = module(torch.randn(B, T, D))
    (computation,) = merged(observed.computations, B)
    assert torch.equal(computation.output, answer)
    assert judge(claimed_by_rows(module, thirds(module, "qkv")), observed, computation, B).is_right


class PooledByOneQuery(nn.Module):
    """A learned query, whose features have gains that all heads share; ``own`` gives each head gains of its own."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.query, self.q, self.kv = nn.Parameter(torch.randn(1, 1, D)), nn.Linear(D, D), nn.Linear(D, 2 * D)
        self.gain = nn.Parameter(torch.rand(H if own else 1, 1, D // H) + 0.5)

    def forward(self, x):
        q = self.q(self.query.expand(len(x), -1, -1))
        q, k, v = (one.unflatten(-1, (H, -1)).transpose(1, 2) for one in (q, *self.kv(x).chunk(2, -1)))
        return torch.softmax((q * self.gain) @ k.mT, -1) @ v


@pytest.mark.parametrize("own", [False, True], ids=["shared", "for each head"])
def test_one_query_for_all_sequences_is_compared_up_to_a_gain_shared_by_heads(own):
    torch.manual_seed(0)
    module = PooledByOneQuery(own=own)
    key, value = module.kv.weight.detach().chunk(2)
    rows = {"query": module.q.weight.detach(), "key": key, "value": value}
    claim = replace(
        claimed_by_rows(module, rows),
        bias=lambda role: module.q.bias.detach().view(H, -1) if role == "query" else None,
    )
    assert judged(module, claim).is_right is (None if own else True)
    swapped = claimed_by_rows(module, rows | {"query": rows["query"].view(H, -1, D)[[1, 0, 2, 3]].flatten(0, 1)})
    assert not judged(module, swapped).is_right


class TimeFirst(nn.Module):
    """Multiplies with time and heads in dims of their own: the softmax runs over a dim in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D, bias=False)

    def forward(self, x):
        q, k, v = (one.unflatten(-1, (H, -1)).transpose(0, 1) for one in self.qkv(x).chunk(3, -1))
        weights = torch.softmax(torch.einsum("ibhd,jbhd->ijbh", q, k), 1)
        return torch.einsum("ijbh,jbhd->ibhd", weights, v).transpose(0, 1).flatten(2)


def test_queries_and_keys_are_distinguished_if_the_softmax_runs_over_a_middle_dimension():
    torch.manual_seed(0)
    module = TimeFirst()
    rows = thirds(module, "qkv")
    assert judged(module, claimed_by_rows(module, rows)).is_right
    swapped = rows | {"query": rows["key"], "key": rows["query"]}
    assert judged(module, claimed_by_rows(module, swapped)).is_right is False


class UncalledOutput(nn.Module):
    """Uses the weight of its output projection without calling it, as `nn.MultiheadAttention` does."""

    def __init__(self, *, turned: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.turned = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D), turned

    def forward(self, x):
        q, k, v = (one.unflatten(-1, (H, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        heads = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        weight = self.out.weight.mT if self.turned else self.out.weight
        return torch.nn.functional.linear(heads, weight, self.out.bias)


@pytest.mark.parametrize("turned", [False, True])
def test_an_output_weight_used_without_calling_its_module_is_compared_with_the_output_of_the_attention(turned):
    torch.manual_seed(0)
    module = UncalledOutput(turned=turned)
    rows = thirds(module, "qkv")
    claim = claimed_by_rows(module, rows)
    output = module.out.weight.detach().view(D, H, -1).permute(1, 2, 0)
    whole = replace(
        claim,
        weight=lambda role: output if role == "output" else claim.weight(role),
        output_projection=module.out,
        roles=claim.roles | {"output"},
    )
    assert judged(module, whole).is_right is (None if turned else True)


class OwnLinear(nn.Module):
    """A linear map of a class of its own; ``turned`` multiplies with another matrix than the one that it holds."""

    def __init__(self, *, turned: bool) -> None:
        super().__init__()
        self.weight, self.turned = nn.Parameter(torch.randn(D, D)), turned

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight.mT if self.turned else self.weight)


class HeadsAlone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D, bias=False)

    def forward(self, x):
        q, k, v = (one.unflatten(-1, (H, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class OutputBeside(nn.Module):
    """Its output projection lies beside the module that computes attention, as in BERT."""

    def __init__(self, *, turned: bool) -> None:
        super().__init__()
        self.inner, self.out = HeadsAlone(), OwnLinear(turned=turned)

    def forward(self, x):
        return self.out(self.inner(x))


@pytest.mark.parametrize("wrong", ["", "turned", "claim"])
def test_an_output_projection_outside_the_module_is_compared_with_its_own_inputs_and_outputs(wrong):
    torch.manual_seed(0)
    model = OutputBeside(turned=wrong == "turned")
    claim = claimed_by_rows(model.inner, thirds(model.inner, "qkv"))
    output = model.out.weight.detach().view(D, H, -1).permute(1, 2, 0)
    output = output[[1, 0, 2, 3]] if wrong == "claim" else output
    whole = replace(
        claim,
        weight=lambda role: output if role == "output" else claim.weight(role),
        roles=claim.roles | {"output"},
    )
    assert judged(model, whole).is_right is (wrong == "")


class AddsToValues(nn.Module):
    """Values to which an input is added, such as those of an earlier layer."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleDict({role: nn.Linear(D, D) for role in ("query", "key", "value")})

    def forward(self, x, earlier):
        query, key, value = (one(x) for one in self.maps.values())
        query, key, value = (one.unflatten(-1, (H, -1)).transpose(1, 2) for one in (query, key, value + earlier))
        return ((query @ key.mT).softmax(-1) @ value).transpose(1, 2).flatten(2)


def test_values_with_an_added_input_are_right_only_if_the_claim_says_so_and_heads_are_in_order():
    torch.manual_seed(0)
    part, first = AddsToValues(), nn.Linear(D, D)
    rows = {role: one.weight.detach() for role, one in part.maps.items()}
    run = nn.Module()
    run.part, run.first = part, first
    run.forward = lambda x: part(x, first(x.tanh()))
    claim = claimed_by_rows(part, rows)
    assert judged(run, claim).is_right is False
    assert judged(run, replace(claim, has_added_values=True)).is_right
    turned = claimed_by_rows(part, rows | {"value": rows["value"].view(H, 8, D).flip(0).flatten(0, 1)})
    assert judged(run, replace(turned, has_added_values=True)).is_right is False


class TurnsValues(nn.Module):
    """Values that each position multiplies with a matrix of its own, or all with the same."""

    def __init__(self, *, is_everywhere_the_same: bool) -> None:
        super().__init__()
        self.maps = nn.ModuleDict({role: nn.Linear(D, D) for role in ("query", "key", "value")})
        turns = torch.linalg.qr(torch.randn(T, 8, 8)).Q
        self.turns = turns[:1].expand(T, -1, -1) if is_everywhere_the_same else turns

    def forward(self, x):
        query, key, value = (one(x).unflatten(-1, (H, -1)).transpose(1, 2) for one in self.maps.values())
        value = (value[..., None, :] @ self.turns)[..., 0, :]
        return ((query @ key.mT).softmax(-1) @ value).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("is_everywhere_the_same", [False, True])
def test_a_claim_without_values_is_right_if_no_single_projection_gives_all_positions(is_everywhere_the_same):
    torch.manual_seed(0)
    module = TurnsValues(is_everywhere_the_same=is_everywhere_the_same)
    rows = {role: module.maps[role].weight.detach() for role in ("query", "key")}
    assert judged(module, claimed_by_rows(module, rows)).is_right is not is_everywhere_the_same


class FilteredPixels(nn.Module):
    """Each feature of queries, keys and values has a filter of its own over 3 x 3 pixels, and each head a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)
        self.filters = nn.ModuleList(nn.Conv2d(D // H, D // H, 3, padding=1, groups=D // H) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(D // H) for _ in range(3))

    def forward(self, x):
        batch, positions, _ = x.shape
        roles = []
        for one, filters, norm in zip(self.qkv(x).chunk(3, -1), self.filters, self.norms):
            pixels = rearrange(one, "b (y x) (h d) -> (b h) d y x", h=H, x=4)
            roles.append(norm(rearrange(filters(pixels), "(b h) d y x -> b h (y x) d", h=H)))
        query, key, value = roles
        return (torch.softmax(query @ key.mT, -1) @ value).transpose(1, 2).reshape(batch, positions, D)


def _side_by_side(rows):
    return {role: one.view(H, -1, D).unbind() for role, one in rows.items()}


_CLAIMS = {
    "side by side": _side_by_side,
    "swapped roles": lambda rows: _side_by_side(rows | {"query": rows["key"], "key": rows["query"]}),
    "permuted heads": lambda rows: _side_by_side(rows) | {"key": rows["key"].view(H, -1, D).unbind()[::-1]},
    "interleaved heads": lambda rows: _side_by_side(rows) | {"value": rows["value"].view(-1, H, D).unbind(1)},
}


@pytest.mark.parametrize("claimed", _CLAIMS)
def test_changing_one_head_at_a_time_separates_heads_after_filters_and_a_norm(claimed):
    torch.manual_seed(0)
    module = FilteredPixels()
    x = torch.randn(3, 16, D)
    before = {name: one.clone() for name, one in module.state_dict().items()}
    rows = dict(zip(("query", "key", "value"), module.qkv.weight.detach().chunk(3)))
    claim = replace(claimed_by_rows(module, rows), weight=_CLAIMS[claimed](rows).__getitem__)
    assert each_head_changes_alone(claim, lambda: module(x), 3) is (claimed == "side by side")
    assert all(torch.equal(one, before[name]) for name, one in module.state_dict().items())
