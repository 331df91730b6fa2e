"""`ReviveHeads`: fresh key and query weights for redundant heads."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.arguments import number, whole_number
from hdi_callback.attention import ROLES, AttentionLayer, HeadSlice
from hdi_callback.core import Folding, attention_agreement, fold_head, folding_error, fresh_head
from hdi_callback.deprecation import renamed_argument, renamed_attribute
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.alerts import Alert
from hdi_callback.monitoring.interventions.action import Action
from hdi_callback.monitoring.interventions.intervention import Intervention
from hdi_callback.monitoring.interventions.parameters import owner_of, parameters_of, refuse_sharded


class ReviveHeads(Intervention):
    """Assign fresh key and query weights in another subspace to redundant heads.

    In each group of similar heads, all but the one that contributes most get fresh key and query weights, as far from
    the other heads' as the width allows, and at their scale. Their contribution is folded into that head, and their own
    output slices are set to zero, so that the layer computes the same if they attended alike. Their entries in the
    optimizer's state are cleared. Under grouped-query attention a key head is revived together with its query heads,
    and query heads that score alike (the rule "merged scores") get fresh queries only. It goes on at later readings
    while the alert is active.

    Before anything is written the relative error of the head's output is estimated from the weights, see
    `folding_error`: what the other head's values cannot express, and where its attention differs. A head with a larger
    error than `max_output_error` is left as it is, and the action says so. So are heads whose own position terms or
    sinks differ; terms that are passed to the module, as ALiBi's, are not known.

    Args:
        seed: seed of its own random generator, the same on every rank.
        max_output_error: largest relative error of a head's output, in [0, 1], that the head it is folded into may
            leave; 1 for any.
        max_loss: deprecated, an earlier name of `max_output_error`.
        options: see `Intervention`; by default it answers the rules "worst pair" and "merged scores".

    Raises:
        MisconfigurationError: if an argument cannot work.
    """

    name = "ReviveHeads"
    waits_for_change = True
    rules = ("worst pair", "merged scores")
    at_most = 16
    max_loss = renamed_attribute("max_loss", "max_output_error")

    def __init__(
        self, *, seed: int = 0, max_output_error: float = 0.1, max_loss: float | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        max_output_error = renamed_argument("max_loss", "max_output_error", max_loss, max_output_error)
        self.seed = whole_number("seed of ReviveHeads", seed, least=0, example=0)
        self.max_output_error = number(
            "max_output_error of ReviveHeads", max_output_error, above=0, below=1, includes="[]", example=0.1
        )
        self._refused: set[tuple[str, str, tuple[int, ...]]] = set()

    def check(self) -> None:
        """Refuse layers whose heads cannot be written in place."""
        for layer in self.training.layers.values():
            if not self.is_for_layer(layer.name):
                continue
            refuse_sharded(layer, self.name)
            if layer.num_value_heads != layer.num_key_heads:
                raise MisconfigurationError(
                    f"ReviveHeads cannot fold a head of `{layer.name}` into another, for it has {layer.num_key_heads} "
                    f"key heads and {layer.num_value_heads} value heads: leave the layer out with layers=[...]."
                )
            if "value" in layer.normed:
                raise MisconfigurationError(
                    f"ReviveHeads cannot fold a head of `{layer.name}` into another, for a norm follows its values: "
                    f"leave the layer out with layers=[...]."
                )
            for role in ROLES:
                if role not in layer.slices or owner_of(layer, layer.weight(role)) is None:
                    raise MisconfigurationError(
                        f"ReviveHeads cannot write the {role} heads of `{layer.name}` in place ({layer.kind}): leave "
                        f"the layer out with layers=[...]."
                    )

    @torch.no_grad()
    def act(self, alert: Alert) -> Action | None:
        """Revive all but the strongest head of each group of similar heads."""
        layer = self.training.layers.get(alert.layer)
        if layer is None:
            return None
        of_queries = _names_query_heads(alert, layer)
        heads = layer.num_heads if of_queries else layer.num_key_heads
        if heads < 2:
            return None
        groups = alert.finding.groups or (alert.finding.heads or tuple(range(heads)),)
        strength = self._strength(layer)
        if of_queries:
            strength = self._strength_of_members(layer)
        parts: list[_Part] = []
        for group in groups:
            stays = max(group, key=lambda head: float(strength[head]))
            losses = {head: self._loss(layer, head, stays, of_queries) for head in group if head != stays}
            leaving = [head for head, lost in losses.items() if lost <= self.max_output_error]  # NaN is not
            kept = {head: lost for head, lost in losses.items() if head not in leaving}
            parts.append(_Part(stays, leaving, max((losses[head] for head in leaving), default=0.0), kept))
        left = "; ".join(self._left(part.kept, part.stays) for part in parts if part.kept)
        acting = [part for part in parts if part.leaving]
        if not acting:
            self._refused.add((alert.layer, alert.rule, alert.finding.heads))
            first = parts[0]
            kept = {head: lost for part in parts for head, lost in part.kept.items()}
            return self._refusal(alert, left, heads=list(kept), stays=first.stays, lost=max(kept.values()))
        leaving = [head for part in acting for head in part.leaving]
        lost = max(part.lost for part in acting)
        stays = acting[0].stays
        what = "query" if of_queries else "key and query"
        done = f"assigned fresh {what} weights to head {_listed(leaving)}"
        after = f"; {left}" if left else ""
        if self.dry_run:
            return self._action(alert, f"{done}{after}", heads=leaving, stays=stays, lost=lost)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {alert.step} {alert.layer}".encode()))
        with self._all_or_nothing(layer):
            for part in acting:
                for head in part.leaving:
                    self._revive(layer, head, part.stays, generator, of_queries)
        taken = _listed(list(dict.fromkeys(part.stays for part in acting)))
        it = "it" if len(leaving) == 1 else "they"
        error_clause = (
            ""
            if lost < 0.005
            else f", with a relative error of about {100 * lost:.0f} %, as head {taken} attends or writes differently "
            f"(max_output_error={self.max_output_error:g} allows it)"
        )
        return self._action(
            alert,
            f"{done}; head {taken} now adds to the output what {it} added{error_clause}{after}",
            heads=leaving,
            stays=stays,
            lost=lost,
        )

    def go_on(self, alert: Alert) -> Action | None:
        """Revive again while the alert is active, unless it was refused for these heads."""
        if (alert.layer, alert.rule, alert.finding.heads) in self._refused:
            return None
        return self.answer(alert)

    def _left(self, losses: Mapping[int, float], stays: int) -> str:
        shares = ", ".join(f"{100 * lost:.0f} %" for lost in losses.values())
        return (
            f"left head {_listed(list(losses))} as {'it is' if len(losses) == 1 else 'they are'}: head {stays} would "
            f"replace the output with a relative error of about {shares}, above "
            f"max_output_error={self.max_output_error:g}"
        )

    def _strength(self, layer: AttentionLayer) -> Tensor:
        """Norm of each key head's map from input to output."""
        values, outputs = layer.weight("value").double(), layer.weight("output").double()
        group = layer.num_heads // layer.num_key_heads
        maps = values.repeat_interleave(group, 0).mT @ outputs  # (H, d_in, d)
        return maps.square().sum((-2, -1)).view(-1, group).sum(-1)

    def _strength_of_members(self, layer: AttentionLayer) -> Tensor:
        """Norm of each query head's map from input to output."""
        group = layer.num_heads // layer.num_key_heads
        maps = layer.weight("value").double().repeat_interleave(group, 0).mT @ layer.weight("output").double()
        return maps.square().sum((-2, -1))

    def _loss(self, layer: AttentionLayer, head: int, stays: int, of_queries: bool = False) -> float:
        """Relative error of a head's output once it is folded into another; the largest over its members."""
        queries, keys = layer.weight("query"), layer.weight("key")
        biases = _query_biases(layer)
        normed = "query" in layer.normed or "key" in layer.normed
        group = layer.num_heads // layer.num_key_heads
        losses = []
        for leaving, staying in _members(head, stays, group, of_queries):
            if not layer.weight("output")[leaving].any():
                losses.append(0.0)  # it contributes nothing
                continue
            if _has_terms_of_its_own(layer, leaving, staying):
                return 1.0
            agreement = attention_agreement(
                (queries[staying], queries[leaving]),
                (keys[staying // group], keys[leaving // group]),
                None if biases is None else (biases[staying], biases[leaving]),
                is_normed=normed,
            )
            losses.append(float(folding_error(self._fold(layer, leaving, staying).lost, agreement)))
        return math.nan if any(map(math.isnan, losses)) else max(losses)

    def _fold(self, layer: AttentionLayer, leaving: int, staying: int) -> Folding:
        values, outputs, biases = layer.weight("value"), layer.weight("output"), _value_biases(layer)
        group = layer.num_heads // layer.num_key_heads
        head, stays = leaving // group, staying // group
        both = None if biases is None else (biases[stays], biases[head])
        return fold_head((values[stays], values[head]), (outputs[staying], outputs[leaving]), both)

    def _revive(
        self, layer: AttentionLayer, head: int, stays: int, generator: torch.Generator, of_queries: bool = False
    ) -> None:
        outputs, constant = layer.weight("output"), _output_bias(layer)
        group = layer.num_heads // layer.num_key_heads
        for leaving, staying in _members(head, stays, group, of_queries):
            folded = self._fold(layer, leaving, staying)
            outputs[staying] = folded.output
            if constant is not None:
                constant += folded.bias.to(constant)
            outputs[leaving] = 0
            self._forget(layer, outputs[leaving])
            queries = layer.weight("query")
            queries[leaving] = fresh_head(queries, leaving, generator=generator)
            self._forget(layer, queries[leaving])
        if of_queries:
            return
        keys = layer.weight("key")
        keys[head] = fresh_head(keys, head, generator=generator)
        self._forget(layer, keys[head])

    @contextmanager
    def _all_or_nothing(self, layer: AttentionLayer) -> Iterator[None]:
        """Restore the weights and the state of the optimizer if the block fails."""
        owners = parameters_of(layer)
        kept = [
            item
            for optimizer in self.training.optimizers
            for owner in owners
            for item in optimizer.state.get(owner, {}).values()
            if isinstance(item, Tensor)
        ]
        before = [(tensor, tensor.detach().clone()) for tensor in (*owners, *kept)]
        try:
            yield
        except BaseException:
            for tensor, value in before:
                tensor.detach().copy_(value)
            raise

    def _forget(self, layer: AttentionLayer, part: Tensor) -> None:
        """Clear the optimizer's state of a part of a parameter."""
        owner = owner_of(layer, part)
        if owner is None:
            return
        for optimizer in self.training.optimizers:
            for kept in optimizer.state.get(owner, {}).values():
                if isinstance(kept, Tensor) and _lie_alike(kept, owner):
                    offset = kept.storage_offset() + part.storage_offset() - owner.storage_offset()
                    kept.as_strided(part.shape, part.stride(), offset).zero_()


@dataclass(frozen=True)
class _Part:
    """Plan for one group: the head that stays, those that leave, the losses, and those that are kept."""

    stays: int
    leaving: list[int]
    lost: float
    kept: dict[int, float]


def _names_query_heads(alert: Alert, layer: AttentionLayer) -> bool:
    """Whether an alert counts the query heads of a layer whose keys are shared."""
    is_grouped = layer.num_heads != layer.num_key_heads
    return is_grouped and (alert.finding.metric or "").startswith(("circuit_", "attention_"))


def _members(head: int, stays: int, group: int, of_queries: bool) -> list[tuple[int, int]]:
    """Pair the query heads that leave with those that stay."""
    if of_queries:
        return [(head, stays)]
    return [(head * group + member, stays * group + member) for member in range(group)]


def _query_biases(layer: AttentionLayer) -> Tensor | None:
    module, query = layer.module, layer.slices["query"]
    if isinstance(module, nn.MultiheadAttention):
        bias = module.in_proj_bias
        return None if bias is None else bias[: module.embed_dim].view(query.heads, query.width)
    return query.bias() if isinstance(query, HeadSlice) else None


def _has_terms_of_its_own(layer: AttentionLayer, one: int, other: int) -> bool:
    """Return whether the module has parameters or buffers by head, besides projections, in which two heads differ."""
    owners = {id(owner_of(layer, layer.weight(role))) for role in layer.slices}
    for name, item in (*layer.module.named_parameters(), *layer.module.named_buffers()):
        if id(item) in owners or (name.endswith("bias") and item.dim() == 1 and item.shape[0] != layer.num_heads):
            continue
        for dim, size in enumerate(item.shape):
            if size == layer.num_heads and not torch.equal(item.select(dim, one), item.select(dim, other)):
                return True
    return False


def _value_biases(layer: AttentionLayer) -> Tensor | None:
    module, value = layer.module, layer.slices["value"]
    if isinstance(module, nn.MultiheadAttention):  # one bias for all three, whether or not their weights are one
        bias = module.in_proj_bias
        return None if bias is None else bias[2 * module.embed_dim :].view(value.heads, value.width)
    return value.bias() if isinstance(value, HeadSlice) else None


def _output_bias(layer: AttentionLayer) -> Tensor | None:
    if isinstance(layer.module, nn.MultiheadAttention):
        return layer.module.out_proj.bias
    bias = getattr(layer.output_projection, "bias", None)
    return bias if isinstance(bias, Tensor) else None


def _lie_alike(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same strides, except in dimensions of size one."""
    strides = zip(one.stride(), other.stride(), other.shape)
    return one.shape == other.shape and all(own == its or size == 1 for own, its, size in strides)


def _listed(heads: Sequence[int]) -> str:
    return ", ".join(str(head) for head in heads)
