"""`QKClip`: scales down the queries and keys of heads whose largest score exceeds a limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdi_callback.arguments import number
from hdi_callback.attention import AttentionLayer, HeadSlice, Role
from hdi_callback.attention.observe import AttentionObserver, RowChunk
from hdi_callback.errors import MisconfigurationError
from hdi_callback.guard import attempt_each, guarded
from hdi_callback.monitoring.alerts import Alert
from hdi_callback.monitoring.interventions.action import Action
from hdi_callback.monitoring.interventions.intervention import Intervention
from hdi_callback.monitoring.interventions.parameters import owner_of, refuse_sharded
from hdi_callback.monitoring.interventions.training import Training
from hdi_callback.monitoring.readings import Record
from hdi_callback.monitoring.warn_once import WarnOnce

_ALL_QUERIES = 2**40
_BOUND = "attention_logit_bound"


class QKClip(Intervention):
    r"""Scale the query and key weights of heads whose largest score exceeds a limit, after the optimizer's step.

    .. math:: W_Q^h \to \sqrt{\gamma_h} \, W_Q^h, \quad W_K^h \to \sqrt{\gamma_h} \, W_K^h, \qquad
              \gamma_h = \min(1, \mathrm{limit} / S_h)

    with :math:`S_h` the largest score of all queries of the forwards of that step, and biases scaled alike (Kimi Team
    2025, MuonClip). Where heads share a key, the key is scaled only if all of them exceed the limit, by the factor
    closest to 1, and the queries by the rest: so a head below the limit is never changed, not by a bit.

    Layers whose ``attention_logit_bound``, which no score can exceed, is below half of the limit at a reading are not
    checked until the next reading; of all others every forward is observed, with all of its queries. Without that
    metric all layers are observed. It answers no alerts.

    Where to put the limit: at the largest score (``attention_logit``) of a healthy run of the same model, no lower.
    Small models, whose scores came to 5 to 12, were brought back so, and by a limit of 30 not; MuonClip has 100 for
    large ones.

    Additive terms of the scores (masks, ALiBi) count in :math:`S_h` and are not scaled: where they are positive, a head
    may take more than one step to come below the limit.

    Args:
        limit: largest score that is left as it is.
        options: `layers`, `at_most` (steps at which weights are scaled; without a limit by default) and `dry_run`, see
            `Intervention`.

    Raises:
        MisconfigurationError: if an argument cannot work.
    """

    name = "QKClip"
    rules = ()
    at_most = 2**62
    answers_alerts = False

    def __init__(self, limit: float = 100.0, **options: Any) -> None:
        unknown = sorted(set(options) - {"layers", "at_most", "dry_run"})
        if unknown:
            raise MisconfigurationError(
                f"QKClip answers no alerts, so it takes `layers`, `at_most` and `dry_run`, and not {unknown[0]!r}."
            )
        super().__init__(**options)
        self.limit = number("limit of QKClip", limit, above=0, below=math.inf, example=100)
        self.watched: list[str] | None = None  # all, until the first reading with bounds
        self._observers: dict[str, AttentionObserver] = {}
        self._compared: set[str] = set()  # names of layers whose projections were compared with their attention
        self._largest: dict[str, Tensor] = {}
        self._done: dict[str, _Clipped] = {}
        self._steps: Tensor | None = None  # at which weights were scaled since `count` was brought up to date
        self._expected: dict[int, list[Tensor]] = {}  # optimizer -> what it sends to other ranks if it has no scores
        self._has_failed = False
        self._handles: list[Any] = []
        self._warn_once = WarnOnce()

    def describe(self) -> str:
        """Describe what it does, and how often."""
        dry = ", dry run" if self.dry_run else ""
        often = "" if self.at_most == type(self).at_most else f", at most {self.at_most} times"
        return f"{self.name}: after every step, heads with a score above {self.limit:g}{often}{dry}"

    def attach(self, training: Training) -> None:
        """Watch the steps of every optimizer."""
        self.detach()
        self.watched = None
        super().attach(training)
        self._expect()
        for optimizer in training.optimizers:
            self._handles.append(optimizer.register_step_post_hook(self._after_step))

    def detach(self) -> None:
        """Remove hooks and observers."""
        removing: list[Callable[[], object]] = [handle.remove for handle in self._handles]
        removing += [part for observer in self._observers.values() for part in (observer.release, observer.suspend)]
        attempt_each([*removing, self._forget])

    def _forget(self) -> None:
        self._handles.clear()
        self._observers.clear()
        self._compared.clear()
        self._largest.clear()
        self._done.clear()
        self._expected.clear()
        self._steps = None
        self._has_failed = False

    def __getstate__(self) -> dict[str, Any]:
        """Drop hooks and observers as well."""
        left: dict[str, Any] = {"_handles": [], "_observers": {}, "_compared": set(), "_largest": {}}
        left |= {"_done": {}, "_steps": None, "_expected": {}, "_has_failed": False}
        left["_warn_once"] = WarnOnce()
        return {**super().__getstate__(), **left}

    def check(self) -> None:
        """Refuse layers where scaling the weights does not scale the scores, or cannot be written in place."""
        for layer in self.training.layers.values():
            if self.is_for_layer(layer.name):
                refuse_sharded(layer, self.name)
                if why := _why_not(layer):
                    raise MisconfigurationError(
                        f"QKClip cannot bound the scores of `{layer.name}`: {why}. Leave the layer out with "
                        "layers=[...]."
                    )

    def act(self, alert: Alert) -> Action | None:
        """Do nothing: it answers scores, not alerts."""
        return None

    def before_forward(self) -> None:
        """Observe the forward that follows, in the layers whose bound does not rule out too large scores."""
        self._collect()
        if self.count >= self.at_most:
            return
        for name, layer in self.training.layers.items():
            if self.is_for_layer(name) and (self.watched is None or name in self.watched):
                observer = self._observers.get(name)
                if observer is None:
                    observer = self._observers[name] = AttentionObserver(
                        layer.module, [layer], max_queries=_ALL_QUERIES, reduce_rows=_Largest.of
                    )
                observer.arm(keeps_samples=name not in self._compared)

    def report(self, record: Record) -> list[str]:
        """Return the layers whose bound does not rule out too large scores.

        Args:
            record: the reading.

        Returns:
            Names of layers.
        """
        bounds = {name: layer.arrays.get(_BOUND, ()) for name, layer in record.layers.items()}
        return [name for name, bound in bounds.items() if not bound or not _is_cleared(bound, self.limit)]

    def follow(self, record: Record, reported: list[str]) -> Action | None:
        """Observe the layers that the first rank reports, and report what was done since the last reading."""
        self.watched = list(reported)
        self._expect()
        self._count_up()
        self._name_what_no_optimizer_holds()
        done, self._done = self._done, {}
        parts, facts = [], {}
        for name, clipped in done.items():
            heads = {head: int(times) for head, times in enumerate(clipped.times.tolist()) if times > 0}
            if heads:
                largest = float(clipped.largest.max())
                listed = ", ".join(str(head) for head in heads)
                parts.append(f"{name}: head {listed}, up to {max(heads.values())} times, largest score {largest:.3g}")
                facts[name] = {"heads": list(heads), "times": list(heads.values()), "largest": largest}
        if not parts:
            return None
        verb = "would have scaled" if self.dry_run else "scaled"
        message = (
            f"step {record.step}: {self.name} {verb} queries and keys of heads whose score exceeds {self.limit:g} "
            f"({'; '.join(parts)})"
        )
        return Action(record.step, self.name, next(iter(facts)), message, self.dry_run, facts)

    def _name_what_no_optimizer_holds(self) -> None:
        """Warn of layers above the limit that are never scaled, as their optimizer keeps weights of its own."""
        held = {
            id(parameter)
            for optimizer in self.training.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for name, largest in self._largest.items():
            layer = self.training.layers[name]
            if any(id(owner) in held for owner in _owners(layer)) or not bool((largest > self.limit).any()):
                continue
            self._warn_once.warn(
                f"{name} is in no optimizer",
                f"QKClip leaves `{name}` as it is, though a score of {float(largest.max()):.3g} exceeds "
                f"{self.limit:g}: no optimizer holds its query and key weights, as where they are frozen, or where an "
                "optimizer steps copies of its own and writes them back.",
            )

    def state_dict(self) -> dict[str, Any]:
        """State for a resumed run."""
        self._count_up()
        done = {name: clipped.plain() for name, clipped in self._done.items()}
        return {**super().state_dict(), "watched": self.watched, "done": done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        super().load_state_dict(state)
        watched = state.get("watched")
        self.watched = None if watched is None else list(watched)
        self._done = {name: _Clipped.of(plain) for name, plain in state.get("done", {}).items()}
        self._steps = None

    def _count_up(self) -> None:
        """Count the steps at which weights were scaled; the host waits for the device here, once for each reading."""
        if self._steps is not None:
            self.count += int(self._steps)
        self._steps = None

    def _collect(self) -> None:
        """Collect the largest scores of the observed forward, if there was one."""
        attempt_each([partial(self._collect_from, *one) for one in self._observers.items()])

    def _collect_from(self, name: str, observer: AttentionObserver) -> None:
        observer.disarm()
        layer = self.training.layers.get(name)
        is_first = name not in self._compared
        if is_first and observer.has_run:
            observer.verdicts()  # which dimension numbers heads; later forwards keep to it
            self._compared.add(name)
        cores = [core for core in observer.cores if core.is_recorded]
        observer_ran = observer.has_run
        read = [core.rows.largest for core in cores if core.rows is not None and core.rows.is_known]
        unread = [core for core in cores if core.rows is None or not core.rows.is_known]
        observer.release()
        if layer is None or not observer_ran or not cores:
            return
        if unread or any(len(largest) != layer.num_heads for largest in read):
            if is_first:
                return
            why = next((core.unread for core in unread if core.unread), "its scores are not known")
            self._warn_once.warn(name, f"QKClip leaves `{name}` as it is: {why}.")
            return
        for largest in read:
            before = self._largest.get(name)
            self._largest[name] = largest if before is None else torch.maximum(before, largest)

    def _expect(self) -> None:
        """Note what each optimizer sends to other ranks after a step for which it has no scores."""
        self._expected = {
            id(optimizer): self._without_scores(self._stepped_by(optimizer)) for optimizer in self.training.optimizers
        }

    @staticmethod
    def _without_scores(layers: Sequence[AttentionLayer]) -> list[Tensor]:
        return [torch.full((layer.num_heads,), -torch.inf, device=layer.weight("query").device) for layer in layers]

    def _stepped_by(self, optimizer: Optimizer) -> list[AttentionLayer]:
        """The layers to clip after a step of an optimizer."""
        if self.count >= self.at_most:
            return []
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [
            layer
            for name, layer in self.training.layers.items()
            if self.is_for_layer(name)
            and (self.watched is None or name in self.watched)
            and any(id(owner) in stepped for owner in _owners(layer))
        ]

    # Called by the optimizers, inside the user's `optimizer.step()`.

    @guarded("scaling queries and keys")
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # Other ranks wait for the maxima of this one, so it sends them whatever fails before, and that it has failed.
        # They do not meet in the store: that would be a wait of the hosts after every step.
        scores, layers = self._expected.get(id(optimizer), []), list[AttentionLayer]()
        with self._warn_once.guard("observing scores"):
            self._collect()
        with self._warn_once.guard("scaling queries and keys"):
            found = self._stepped_by(optimizer)
            scores = self._expected[id(optimizer)] = self._without_scores(found)
            scores, layers = self._scores_of(found, scores), found
        if not scores:
            return
        is_out = torch.full((1,), float(self._has_failed or not layers), device=scores[0].device)
        *largest, is_any_out = self.training.largest_over_ranks([*scores, is_out])
        try:
            self._clip_all(layers, largest, is_any_out)
        except Exception:  # its weights may differ from those of other ranks now, so no rank goes on
            self._has_failed = is_any_out is not is_out  # where there are others
            raise

    def _failed(self, work: str, error: Exception) -> None:
        self._warn_once.error(work, error)

    def _scores_of(self, layers: Sequence[AttentionLayer], none: Sequence[Tensor]) -> list[Tensor]:
        """The largest score of each head on this rank, minus infinity where there is none."""
        mine = [self._largest.pop(layer.name, None) for layer in layers]
        return [blank if one is None else one.to(blank.device) for one, blank in zip(mine, none)]

    @torch.no_grad()
    def _clip_all(self, layers: Sequence[AttentionLayer], largest: Sequence[Tensor], is_out: Tensor) -> None:
        if not layers:
            return
        # All ranks are here after the same step with the same layers, and so agree on every factor.
        exceeds = [scores.isfinite() & (scores > self.limit) for scores in largest]
        place = largest[0].device
        before = torch.zeros((), dtype=torch.long, device=place) if self._steps is None else self._steps.to(place)
        may_act = (self.count + before < self.at_most) & (is_out.to(place) == 0).squeeze()
        self._steps = before + (may_act & torch.stack([one.any().to(place) for one in exceeds]).any())
        for layer, scores, one in zip(layers, largest, exceeds):
            factor = (self.limit / scores).clamp(max=1.0)
            factor = torch.where(one & may_act.to(one.device), factor, 1.0)
            if not self.dry_run:
                clip_heads(layer, factor)
            done = self._done.setdefault(layer.name, _Clipped.none(scores))
            done.add(scores, factor < 1)


@dataclass
class _Clipped:
    """Counts and largest scores of a layer's clipped heads since the last reading, on its device."""

    times: Tensor
    largest: Tensor

    @classmethod
    def none(cls, scores: Tensor) -> _Clipped:
        return cls(torch.zeros_like(scores), torch.full_like(scores, -torch.inf))

    @classmethod
    def of(cls, plain: Mapping[str, Sequence[float | None]]) -> _Clipped:
        largest = [-math.inf if score is None else score for score in plain["largest"]]
        times, scores = (torch.tensor(one, dtype=torch.float32, device="cpu") for one in (plain["times"], largest))
        return cls(times, scores)

    def plain(self) -> dict[str, list[float | None]]:
        largest = [score if math.isfinite(score) else None for score in self.largest.tolist()]
        return {"times": self.times.tolist(), "largest": largest}

    def add(self, scores: Tensor, was_clipped: Tensor) -> None:
        self.times = self.times.to(scores) + was_clipped
        self.largest = torch.maximum(self.largest.to(scores), torch.where(was_clipped, scores, -torch.inf))


@dataclass(frozen=True)
class _Largest:
    """The largest score of each head; adds up over chunks by maximum."""

    largest: Tensor
    is_known: bool

    @classmethod
    def of(cls, chunk: RowChunk) -> _Largest:
        heads = chunk.weights.shape[1]
        if chunk.logits is None:
            return cls(chunk.weights.new_zeros(heads, dtype=torch.float32), False)
        # Rows of padding are zero.
        seen = chunk.visible & (chunk.weights.sum(-1, keepdim=True) > 0)
        scores = torch.where(seen, chunk.logits.float(), -torch.inf)
        return cls(scores.movedim(1, 0).flatten(1).amax(-1), True)

    def __add__(self, other: _Largest) -> _Largest:
        return _Largest(torch.maximum(self.largest, other.largest), self.is_known and other.is_known)


@torch.no_grad()
def clip_heads(layer: AttentionLayer, factor: Tensor) -> None:
    """Scale the scores of the heads of a layer by scaling queries and keys in place.

    Args:
        layer: the layer; its weights can be written in place.
        factor: ``(H,)``, in (0, 1]; a head with 1 is not changed, not by a bit.
    """
    G = layer.num_key_heads
    groups = factor.view(G, -1)
    if groups.shape[1] == 1:
        of_keys = groups[:, 0].sqrt()
    else:
        # The key is scaled only if all of its heads are, by the factor closest to 1.
        least = groups.amax(1)
        of_keys = torch.where(least < 1, least.sqrt(), 1.0)
    of_queries = (groups / of_keys[:, None]).flatten()
    for role, scale in (("query", of_queries), ("key", of_keys)):
        weight = layer.weight(role)  # type: ignore[arg-type]
        weight.mul_(_rounded_down(scale, weight)[:, None, None])
        bias = _bias(layer, role)  # type: ignore[arg-type]
        if bias is not None:
            bias.mul_(_rounded_down(scale, bias)[:, None])


def _rounded_down(scale: Tensor, like: Tensor) -> Tensor:
    """The scale in the type of a weight; in bfloat16 the nearest to 0.999 is 1, which leaves scores above the limit."""
    nearest = scale.to(like)
    below = (scale * (1 - torch.finfo(like.dtype).eps / 2)).to(like)
    return torch.where(nearest.to(scale) > scale, below, nearest)


def _is_cleared(bound: Sequence[float | None], limit: float) -> bool:
    return all(value is not None and value <= limit / 2 for value in bound)


def _owners(layer: AttentionLayer) -> list[nn.Parameter]:
    found = (owner_of(layer, layer.weight(role)) for role in ("query", "key"))
    return [owner for owner in found if owner is not None]


def _bias(layer: AttentionLayer, role: Role) -> Tensor | None:
    module, part = layer.module, layer.slices[role]
    if isinstance(module, nn.MultiheadAttention):
        bias: Tensor | None = module.in_proj_bias
        if bias is None:
            return None
        start = 0 if role == "query" else module.embed_dim
        return bias[start : start + module.embed_dim].view(part.heads, part.width)
    return part.bias() if isinstance(part, HeadSlice) else None


def _why_not(layer: AttentionLayer) -> str:
    """Reason why scaling the weights of a layer does not scale its scores; empty if it does."""
    if layer.num_heads % layer.num_key_heads:
        return f"its {layer.num_heads} heads cannot be divided among {layer.num_key_heads} keys"
    roles: tuple[Role, ...] = ("query", "key")
    for role in roles:
        if role in layer.normed:
            return f"a norm follows its {role}, which undoes the scaling"
        if role not in layer.slices or owner_of(layer, layer.weight(role)) is None:
            return f"its {role} heads cannot be written in place ({layer.kind})"
        bias = _bias(layer, role)
        if bias is not None and owner_of(layer, bias) is None:
            return f"the bias of its {role} heads cannot be written in place ({layer.kind})"
    if getattr(layer.module, "bias_k", None) is not None:
        return "its module adds a key of its own"
    if layer.weight("query").data_ptr() == layer.weight("key").data_ptr():
        return "its queries and keys share their weight"
    return ""
