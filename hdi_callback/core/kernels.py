r"""Attention rows of sampled queries -> `AttentionSums` -> `AttentionRows`.

A head averages values with the row :math:`a_h(q)` over the n keys that query q sees, as a Nadaraya-Watson estimator
does with its kernel. Sums over queries add up over chunks and over ranks, and are divided once, when they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from hdi_callback.core.circuits import CircuitSimilarity
from hdi_callback.core.pairs import largest_pair, live_pairs, mean_over_pairs
from hdi_callback.core.tensors import may_decide_on_host
from hdi_callback.deprecation import renamed_attribute
from hdi_callback.errors import ShapeError

_PIECE = 2048  # products that are added one after the other


@dataclass(frozen=True)
class AttentionRows:
    r"""Attention statistics of a layer's heads, averaged over queries; NaN (positions: -1) where not measured.

    Attributes:
        queries: number of queries that count.
        entropy: ``(H,)``, mean of the entropy over log n: 1 uniform, 0 one token.
        samples: ``(H,)``, mean effective sample size (ESS) ``(sum a)^2 / ||a||^2``, over how many tokens a row
            averages.
        sample_share: ``(H,)``, mean of ESS / n.
        sink: ``(H,)``, the largest mean attention that one key position gets.
        sink_position: ``(H,)``, that position.
        product: ``(H, H)``, :math:`A_{hg} = \operatorname{mean}_q \langle a_h(q), a_g(q) \rangle`.
        overlap: ``(H, H)``, :math:`A_{hg} / \sqrt{A_{hh} A_{gg}}`, in [0, 1]: the correlation of the noise of two
            heads. Heads that are merely both flat have it near 1.
        overlap_mean: mean of `overlap` over the pairs.
        alike: ``(H, H)``, the same of ``a_h - s_h / n`` with the row's sum s_h: do two heads attend alike beyond both
            being flat; in [-1, 1], NaN for a head that is flat to rounding.
        alike_mean: mean of `alike` over the pairs of heads that are not flat.
        alike_worst: the largest `alike` of a pair.
        alike_worst_pair: ``(2,)``, its two heads; -1 with fewer than two heads that are not flat.
        logit: ``(H,)``, the largest score of a sampled query.
        keys: mean number of visible keys, over queries with at least one of several keys visible.
        ahead: ``(H,)``, mean attention to keys that stand behind the query: 0 under a causal mask.
    """

    queries: Tensor
    entropy: Tensor
    samples: Tensor
    sample_share: Tensor
    sink: Tensor
    sink_position: Tensor
    product: Tensor
    overlap: Tensor
    overlap_mean: Tensor
    alike: Tensor
    alike_mean: Tensor
    alike_worst: Tensor
    alike_worst_pair: Tensor
    logit: Tensor
    keys: Tensor
    ahead: Tensor


@dataclass(frozen=True)
class AttentionSums:
    """Sums over queries of the statistics in `AttentionRows`; they add up over disjoint queries, `logit` by maximum.

    Attributes:
        queries: number of queries that count.
        entropy: ``(H,)``, sum of the normalised entropies.
        samples: ``(H,)``, sum of the effective sample sizes.
        sample_share: ``(H,)``, sum of ESS / n.
        columns: ``(H, keys)``, sum of the rows.
        product: ``(H, H)``, sum of the inner products of rows.
        centred: ``(H, H)``, the same with the uniform part taken out.
        logit: ``(H,)``, the largest score; minus infinity where there is none.
        queries_with_keys: number of queries with a visible key, where there are several keys.
        visible_keys: sum of the numbers of their visible keys, mean over heads.
        placed: number of them whose positions among the keys are known.
        ahead: ``(H,)``, sum of their attention to later keys.
    """

    queries: Tensor
    entropy: Tensor
    samples: Tensor
    sample_share: Tensor
    columns: Tensor
    product: Tensor
    centred: Tensor
    logit: Tensor
    queries_with_keys: Tensor
    visible_keys: Tensor
    placed: Tensor
    ahead: Tensor

    seeing = renamed_attribute("seeing", "queries_with_keys")
    seen = renamed_attribute("seen", "visible_keys")

    def of_heads(self, heads: Sequence[int]) -> AttentionSums:
        """Choose heads.

        Args:
            heads: their numbers, in the order in which they are to be.

        Returns:
            The sums of these heads.
        """
        chosen = list(heads)
        of_each = ("entropy", "samples", "sample_share", "columns", "logit", "ahead")
        own = {name: getattr(self, name)[chosen] for name in of_each}
        pairs = {name: getattr(self, name)[chosen][:, chosen] for name in ("product", "centred")}
        return replace(self, **own, **pairs)

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        rows: Tensor,
        visible: Tensor | None = None,
        *,
        logits: Tensor | None = None,
        min_keys: int = 2,
        first: int | Tensor | None = None,
        positions: Tensor | None = None,
    ) -> AttentionSums:
        """Sums of the rows of some queries of one layer.

        Args:
            rows: ``(..., H, queries, keys)``, attention of each query to each key; all dimensions in front of the heads
                are further queries. Rows that add up to less than 1 (learned sinks) are taken as they are.
            visible: boolean, broadcastable to `rows`: True where that query sees that key; all by default. A query to
                leave out sees no key.
            logits: as `rows`, the scores after scale, softcap and bias; masked ones are not read.
            min_keys: queries that see fewer keys are left out of everything but the largest score.
            first: column of the key that is left out, as many heads rest on the first token of a sequence: a number,
                or whole numbers broadcastable to ``(..., H, queries)``. Rows are divided by what is left.
            positions: ``(queries,)``, the positions of the queries among the keys, where both are of one sequence.

        Returns:
            Their sums, in float32 or wider.

        Raises:
            ShapeError: if `rows` has fewer than three dimensions, `logits` another shape, or `visible` does not fit.
        """
        _require_rows(rows, visible, logits)
        H, queries, keys = rows.shape[-3:]
        sequences = rows.shape[:-3].numel()
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        seen = wide.new_ones((), dtype=torch.bool) if visible is None else visible
        # A mask shared by all heads is not expanded: operations on it cost a fraction of those on rows.
        seen = seen[(None,) * (rows.dim() - seen.dim())].expand(*rows.shape[:-3], -1, queries, keys)
        # Where the host may read values, it checks first whether masking is needed: masks cost more than sums there.
        may_look = may_decide_on_host(rows)
        logit = _largest_logit(wide if logits is None else logits, seen, wide.dtype, given=logits is not None)
        sees = seen.sum(-1).to(wide.dtype)  # (..., H or 1, queries)
        # A query counts for all heads or for none, and not at all where there is one key alone.
        seeing = (sees > 0).all(-2) & (keys > 1)
        column = torch.arange(keys, device=rows.device)
        ahead = wide.new_zeros(H)
        if positions is not None:
            later = seen & seeing[..., None, :, None] & (column > positions[:, None])
            if not may_look or bool(later.any()):
                ahead = _per_head(torch.where(later, wide, 0).sum(-1))
        if first is not None:
            seen = seen & (column != (first[..., None] if isinstance(first, Tensor) else first))
        n = seen.sum(-1)
        # A query counts for all heads or for none, so that pairs of heads are compared on the same queries.
        counts = (n >= max(min_keys, 2)).all(-2, keepdim=True)
        mask = seen & counts[..., None]
        is_finite = may_look and bool(wide.sum().isfinite())
        a = wide * mask if is_finite else torch.where(mask, wide, 0)
        total = a.sum(-1)  # (..., H, queries)
        if first is not None:
            counts = counts & ~(total <= 0).any(-2, keepdim=True)
            a.masked_fill_(~counts[..., None], 0)
        n = torch.where(counts, n, 1).to(wide.dtype)
        total = torch.where(counts, total, 1)
        if first is not None:
            a, total = a / total[..., None], torch.ones_like(total)
        energy = torch.linalg.vector_norm(a, dim=-1).square()
        samples = torch.where(counts, total.square() / energy.clamp_min(torch.finfo(wide.dtype).tiny), 0)
        mask = mask if first is None else seen & counts[..., None]
        mean = (total / n)[..., None]
        if is_finite:
            centred = torch.addcmul(a, mean, mask.to(wide.dtype), value=-1)
        else:
            centred = (a - mean).masked_fill_(~mask, 0)
        # What remains of a uniform row is rounding, which may correlate between two heads.
        rounding = 2 * torch.finfo(rows.dtype).eps * energy.sqrt()
        flat = torch.linalg.vector_norm(centred, dim=-1) <= rounding
        if not may_look or bool(flat.any()):
            centred.masked_fill_(flat[..., None], 0)
        every, every_centred = (x.reshape(sequences, H, queries * keys) for x in (a, centred))
        product, of_centred = _inner_products(every), _inner_products(every_centred)
        columns = a.sum(-2).reshape(sequences, H, keys).sum(0)
        entropy = torch.special.entr(a, out=a).sum(-1) / torch.where(counts, n, 2).log()  # uses the rows up
        return cls(
            queries=counts.sum().to(wide.dtype),
            entropy=_per_head(torch.where(counts, entropy, 0)),
            samples=_per_head(samples),
            sample_share=_per_head(samples / n),
            columns=columns,
            product=product,
            centred=of_centred,
            logit=logit,
            queries_with_keys=seeing.sum().to(wide.dtype),
            visible_keys=torch.where(seeing, sees.mean(-2), 0).sum(),
            placed=seeing.sum().to(wide.dtype) * float(positions is not None),
            ahead=ahead,
        )

    def __add__(self, other: AttentionSums) -> AttentionSums:
        """Join disjoint queries of the same heads; the shorter key axis is padded."""
        keys = max(self.columns.shape[-1], other.columns.shape[-1])
        ours, theirs = self.padded(keys), other.padded(keys)
        added = {
            item.name: getattr(ours, item.name) + getattr(theirs, item.name)
            for item in fields(AttentionSums)
            if item.name != "logit"
        }
        return AttentionSums(**added, logit=torch.maximum(self.logit, other.logit))

    def padded(self, keys: int) -> AttentionSums:
        """The same sums with columns of a fixed width, so that shapes agree over ranks.

        Args:
            keys: width of the columns, at least the present one.

        Returns:
            The same sums with zeros in the new columns.

        Raises:
            ShapeError: if the columns are wider already.
        """
        missing = keys - self.columns.shape[-1]
        if missing < 0:
            raise ShapeError(f"The columns have {self.columns.shape[-1]} keys already, more than {keys}.")
        values = {item.name: getattr(self, item.name) for item in fields(AttentionSums)}
        return AttentionSums(**values | {"columns": torch.nn.functional.pad(self.columns, (0, missing))})

    @torch.no_grad()
    def rows(self) -> AttentionRows:
        """Divide the sums by the number of queries.

        Returns:
            The averages; NaN where no query counts.
        """
        queries = self.queries
        # One more column, as an empty tensor has no largest entry.
        sink, position = torch.nn.functional.pad(self.columns, (0, int(self.columns.shape[-1] == 0))).max(-1)
        overlap, alike = _cosine(self.product), _cosine(self.centred)
        # Heads that give all to a learned sink overlap with none; flat ones are like none. NaN stays in, and shows.
        pairs, not_flat = (live_pairs(sums.diagonal() == 0) for sums in (self.product, self.centred))
        alike_worst, alike_worst_pair, *_ = largest_pair(alike, not_flat)
        return AttentionRows(
            queries=queries,
            entropy=self.entropy / queries,
            samples=self.samples / queries,
            sample_share=self.sample_share / queries,
            sink=sink / queries,
            sink_position=torch.where(queries > 0, position, -1),
            product=self.product / queries,
            overlap=overlap,
            overlap_mean=mean_over_pairs(overlap, pairs),
            alike=alike,
            alike_mean=mean_over_pairs(alike, not_flat),
            alike_worst=alike_worst,
            alike_worst_pair=alike_worst_pair,
            logit=torch.where(self.logit == -torch.inf, torch.nan, self.logit),
            keys=self.visible_keys / self.queries_with_keys,
            ahead=self.ahead / self.placed,
        )


@torch.no_grad()
def noise_covariance(product: Tensor, circuits: CircuitSimilarity, *, noise: float = 1.0) -> Tensor:
    r"""Compute the covariance of two heads' contributions under independent noise of their inputs.

    .. math:: N_{hg} = \sigma^2 A_{hg} \langle C_h, C_g \rangle_F

    exact for independent noise :math:`\sigma^2 I` on every token, through values that are linear in it and attention
    that does not depend on it. Ours, after the ensemble view of Fokoué 2026.

    Args:
        product: ``(H, H)``, `AttentionRows.product`.
        circuits: `ov_circuits` of the layer.
        noise: variance :math:`\sigma^2` of the noise of each feature.

    Returns:
        ``(H, H)``, the trace of the covariance of the contributions, averaged over the queries.

    Example:
        >>> from hdi_callback.core import ov_circuits
        >>> alone = ov_circuits(torch.eye(2)[None], torch.eye(2)[None])  # one head that copies
        >>> noise_covariance(torch.tensor([[0.25]]), alone).round(decimals=4).tolist()  # it averages over four tokens
        [[0.5]]
    """
    norm = circuits.norm
    return noise * product * circuits.cosine * norm[..., :, None] * norm[..., None, :]


def _largest_logit(logits: Tensor, seen: Tensor, dtype: torch.dtype, *, given: bool) -> Tensor:
    """Largest visible score of each head; minus infinity if there is none."""
    H = logits.shape[-3]
    if not given or logits.numel() == 0:  # an empty tensor has no largest entry
        return torch.full((H,), -torch.inf, dtype=dtype, device=logits.device)
    logits = logits.to(dtype)
    if may_decide_on_host(logits) and bool(logits.sum().isfinite()):
        masked = logits + logits.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)
    else:
        masked = torch.where(seen, logits, -torch.inf)
    largest: Tensor = masked.amax(-1).movedim(-2, 0).flatten(1).amax(-1)
    return largest


def _inner_products(flat: Tensor) -> Tensor:
    """Inner products of every two heads of ``(sequences, H, numbers)``."""
    # In pieces: of a million products that are added one after the other, float32 keeps five digits.
    count = -(-flat.shape[-1] // _PIECE)
    missing = count * _PIECE - flat.shape[-1]
    padded = torch.nn.functional.pad(flat, (0, missing)) if missing else flat
    pieces = padded.view(*flat.shape[:2], count, _PIECE).transpose(1, 2)
    products: Tensor = (pieces @ pieces.mT).sum((0, 1))
    return products


def _per_head(values: Tensor) -> Tensor:
    """Sums of (..., H, queries) over everything but the heads."""
    return values.movedim(-2, 0).flatten(1).sum(-1)


def _cosine(product: Tensor) -> Tensor:
    """Cosines of inner products (H, H); 1 on the diagonal, NaN for heads of norm 0."""
    own = product.diagonal()
    cosine = product / (own.sqrt()[:, None] * own.sqrt()[None, :])
    eye = torch.eye(len(own), dtype=torch.bool, device=own.device)
    return torch.where(eye & cosine.isfinite(), 1, cosine.clamp(-1, 1))


def _require_rows(rows: Tensor, visible: Tensor | None, logits: Tensor | None) -> None:
    if rows.dim() < 3:
        raise ShapeError(f"Attention rows have the shape (..., heads, queries, keys), got {tuple(rows.shape)}.")
    if logits is not None and logits.shape != rows.shape:
        raise ShapeError(f"Logits have the shape of the rows {tuple(rows.shape)}, got {tuple(logits.shape)}.")
    if visible is not None:
        try:
            visible.expand(rows.shape)
        except RuntimeError:
            raise ShapeError(
                f"`visible` must broadcast to the rows {tuple(rows.shape)}, got {tuple(visible.shape)}."
            ) from None
