"""What collapse looks like: the rules that raise alerts.

They judge *alignment*: overlap against chance, 0 for independent random heads and 1 for identical ones, so that one
limit serves layers of all sizes. Healthy training aligns heads too; therefore limits on the level raise alarms, and
changes alone only a notice. The limits were fixed on looked-at runs and tried on others: docs/alerts.md.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

from hdi_callback.arguments import did_you_mean, number, shown
from hdi_callback.core import chance_of_overlap
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.alerts import Alert, Finding, Level, Row, Rule, Series, check_rule
from hdi_callback.monitoring.readings import NOT_FINITE

Lens = Literal["subspace", "energy"]
_LENSES: tuple[Lens, ...] = ("subspace", "energy")
_MEAN: dict[Lens, str] = {"subspace": "hdi_alignment", "energy": "hdi_energy_alignment"}
_WORST: dict[Lens, str] = {"subspace": "hdi_worst_alignment", "energy": "hdi_energy_worst_alignment"}
_WORST_PAIR: dict[Lens, str] = {"subspace": "worst_alignment_pair", "energy": "energy_worst_alignment_pair"}

_MOVES: dict[tuple[Level, Lens], str] = {
    ("warning", "subspace"): "all heads are closing up",
    ("critical", "subspace"): "all heads are nearly one",
    ("warning", "energy"): "one direction has taken over all heads",
}

_TOGETHER = 0.5  # a mean alignment that the mean's own rule tells of

HYSTERESIS = 0.1
"""An alert on alignment is over this far below the limit that began it."""

_HEALTHY_RUNS = 60  # of small models, in docs/benchmarks/alerts.md
_SEPARATE = "DiversityPenalty, a lower learning rate or more warm-up"


@dataclass(frozen=True)
class Thresholds:
    """The limits of the default rules; `None` switches one off.

    Attributes:
        mean: mean alignment of a layer's heads in the subspace lens that is a warning.
        energy_mean: the same in the energy lens. Healthy language models come close to it: what they learn first is
            often one direction for all heads.
        critical: mean alignment in the subspace lens that is critical.
        pair: alignment of a pair in the subspace lens that is a warning.
        energy_pair: the same in the energy lens; off, as pairs of healthy heads reach .99.
        forecast: alignment in the subspace lens that a trend must be about to reach to be a warning.
        jump: mean alignment in the energy lens that is a warning if it is reached by a late, sudden rise.
        rank: spectral flatness of a head that is a warning, if it has fallen to a tenth of what it was at first.
        tied: probability, under independent initialisation, of heads as alike as they are at step 0.
        trend: rise of ``-log(1 - alignment)`` that is worth a notice.
    """

    mean: float | None = 0.5
    energy_mean: float | None = 0.95
    critical: float | None = 0.9
    pair: float | None = 0.8
    energy_pair: float | None = None
    forecast: float | None = 0.9
    jump: float | None = 0.8
    rank: float | None = 0.005
    tied: float | None = 1e-6
    trend: float | None = 0.05

    def __post_init__(self) -> None:
        for item in fields(self):
            object.__setattr__(self, item.name, _limit(f"{item.name} of Thresholds", getattr(self, item.name)))


def _limit(argument: str, value: Any) -> float | None:
    if value is None:
        return None
    return number(argument, value, above=0, below=1, example="", remedy="; write null (None) to switch it off")


_TRIED = Thresholds()


def _certainty(limit: float, tried: float | None) -> str:
    """Say how sure an alarm is; a limit that is easier to reach than the tried one has no evidence behind it."""
    if tried is None or limit < tried:
        return "this limit has not been tried on healthy runs"
    return f"none of {_HEALTHY_RUNS} healthy runs of small models came here (docs/alerts.md)"


class MeanAlignment(Rule):
    """The heads of a layer have moved together: the mean over their pairs is at a limit.

    Args:
        subspace: limit of the subspace lens that is a warning.
        energy: limit of the energy lens that is a warning.
        critical: limit of the subspace lens that is critical.
    """

    name = "mean alignment"
    needs = ("hdi_alignment", "hdi_energy_alignment")

    def __init__(self, subspace: float | None = 0.5, energy: float | None = 0.95, critical: float | None = 0.9) -> None:
        limits: list[tuple[Level, Lens, float | None]] = [
            ("critical", "subspace", critical),
            ("warning", "subspace", subspace),
            ("warning", "energy", energy),
        ]
        checked = [(level, lens, _limit("a limit of MeanAlignment", limit)) for level, lens, limit in limits]
        self.limits = [(level, lens, limit) for level, lens, limit in checked if limit is not None]

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Find the most serious limit that is reached, by the lens that is further beyond it."""
        if _is_fresh(series):
            return None
        reached = []
        for level, lens, limit in self.limits:
            margin = HYSTERESIS if _stands(active, level) else 0
            value = series.value(_MEAN[lens])
            if value >= limit - margin:
                reached.append((level == "critical", value - limit, level, lens, limit))
        if not reached:
            return None
        *_, level, lens, limit = max(reached)
        metric = _MEAN[lens]
        value = series.value(metric)
        heads = series.latest.values.get("hdi_effective_heads")
        left = "" if heads is None or lens == "energy" else f", {heads:.1f} effective heads are left"
        weighed = ", weighed by energy" if lens == "energy" else ""
        return Finding(
            f"{_MOVES[level, lens]} (mean alignment {_number(value)}{weighed}{_earlier(series, metric)}{left})",
            level,
            value,
            limit,
            metric,
            since=series.since(lambda row: row.values.get(metric, 0) >= limit - HYSTERESIS),
            is_from_start=series.holds_from_start(lambda row: row.values.get(metric, 0) >= limit),
            certainty=_certainty(limit, _TRIED.mean if lens == "subspace" else _TRIED.energy_mean),
            remedy=_SEPARATE,
        )


class WorstPair(Rule):
    """Two heads of a layer are nearly one, whatever the others do.

    Args:
        subspace: limit of the subspace lens.
        energy: limit of the energy lens.
    """

    name = "worst pair"
    needs = ("hdi_worst_alignment", "hdi_energy_worst_alignment")

    def __init__(self, subspace: float | None = 0.8, energy: float | None = None) -> None:
        limits: dict[Lens, float | None] = {"subspace": subspace, "energy": energy}
        checked = {lens: _limit(f"{lens} of WorstPair", limit) for lens, limit in limits.items()}
        self.limits = {lens: limit for lens, limit in checked.items() if limit is not None}

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Find the pair that is further beyond its limit."""
        if _is_fresh(series):
            return None
        margin = HYSTERESIS if active else 0
        reached = []
        for lens, limit in self.limits.items():
            # Where all heads close up, the mean says so, and a pair is nothing to name.
            if active is None and series.latest.values.get(_MEAN[lens], 0) >= _TOGETHER:
                continue
            value = series.value(_WORST[lens])
            if value >= limit - margin:
                reached.append((value - limit, lens, limit))
        if not reached:
            return None
        _, lens, limit = max(reached)
        metric, pair = _WORST[lens], _pair(series.latest, lens)
        value = series.value(metric)
        return Finding(
            f"heads {pair[0]} and {pair[1]} are nearly one head (alignment {_number(value)}"
            f"{', weighed by energy' if lens == 'energy' else ''}{_pair_earlier(series, lens, pair)})",
            "warning",
            value,
            limit,
            metric,
            pair,
            series.since(lambda row: row.values.get(metric, 0) >= limit - HYSTERESIS and _pair(row, lens) == pair),
            _certainty(limit, _TRIED.pair if lens == "subspace" else _TRIED.energy_pair),
            "ReviveHeads or DiversityPenalty" if len(pair) == 2 else "",
            is_from_start=series.holds_from_start(
                lambda row: row.values.get(metric, 0) >= limit and _pair(row, lens) == pair
            ),
        )


class AlignmentForecast(Rule):
    """The heads of a layer, or two of them, are on the way to one another and will be there soon.

    A straight line through ``y = -log(1 - a)`` over the last 20 readings, whose slope is well above its standard error
    (for autocorrelated residuals: inflated by ``sqrt((1 + r) / (1 - r))``), which rises, does not slow down, and
    reaches the limit within 100 readings; three times in a row. Of the subspace lens alone: in the energy lens healthy
    heads move together as fast.

    Args:
        limit: the alignment that is forecast.
        deviations: standard errors by which the slope must exceed zero.
        rise: smallest rise of the alignment over the 20 readings.
    """

    name = "forecast"
    needs = ("hdi_alignment", "hdi_worst_alignment")
    readings: ClassVar[int] = 20
    horizon: ClassVar[int] = 100
    hits: ClassVar[int] = 3

    def __init__(self, limit: float = 0.9, deviations: float = 3.5, rise: float = 0.05) -> None:
        self.limit = number("limit of AlignmentForecast", limit, above=0, below=1, example=0.9)
        self.deviations = number("deviations of AlignmentForecast", deviations, above=0, below=math.inf, example=3.5)
        self.rise = number("rise of AlignmentForecast", rise, above=0, below=1, example=0.05)

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Find the mean or the pair that will be there first."""
        if active is not None:
            assert active.finding.metric is not None
            steps, curve = series.curve(active.finding.metric)
            fit = _line(steps, curve, self.readings)
            # It is over when the rise has ended, not when the alignment has arrived.
            is_rising = fit is not None and fit.slope > fit.error
            return active.finding if is_rising or curve[-1] >= self.limit - HYSTERESIS else None
        found = []
        if series.value(_MEAN["subspace"]) >= _TOGETHER:
            return None
        for metric in self.needs:
            steps, curve = series.curve(metric)
            fit = self._hit(steps, curve)
            if fit is not None and all(self._hit(steps[:-back], curve[:-back]) for back in range(1, self.hits)):
                found.append((self._arrival(fit, curve[-1]), metric, fit, steps, curve))
        if not found:
            return None
        arrival, metric, fit, steps, curve = min(found, key=lambda item: item[0])
        start = len(steps) - self.readings
        pair = _pair(series.latest, "subspace") if metric == _WORST["subspace"] else ()
        who = f"heads {pair[0]} and {pair[1]}" if pair else "all heads"
        return Finding(
            f"{who} are moving together (alignment {_number(curve[-1])}, {_number(curve[start])} "
            f"{steps[-1] - steps[start]} steps ago) and at this rate reach {_number(self.limit)} near step "
            f"{round(steps[-1] + arrival)}",
            "warning",
            curve[-1],
            self.limit,
            metric,
            pair,
            since=steps[start],
            certainty=f"the slope is {fit.slope / max(fit.error, 1e-12):.1f} standard errors from zero",
            remedy=_SEPARATE,
        )

    def _hit(self, steps: list[int], curve: list[float]) -> _Line | None:
        # The rise is asked first: it is cheap, and in most layers there is none.
        if len(curve) < self.readings or not self.rise <= curve[-1] - curve[-self.readings]:
            return None
        fit = _line(steps, curve, self.readings)
        if fit is None or not self.deviations * fit.error < fit.slope or fit.late < fit.early:
            return None
        reading = (steps[-1] - steps[-self.readings]) / (self.readings - 1)
        is_near = curve[-1] < self.limit and self._arrival(fit, curve[-1]) <= self.horizon * reading
        return fit if is_near else None

    def _arrival(self, fit: _Line, now: float) -> float:
        """Steps until the limit."""
        return (_stretch(self.limit) - _stretch(now)) / fit.slope


class AlignmentTrend(Rule):
    """The alignment of a layer has begun to rise: worth a line in the log, never an alarm.

    A CUSUM (Page 1954) over the increments of ``y = -log(1 - a)``, in units of their standard deviation over the first
    20 readings that are kept; its limit is Siegmund's for `false_alarms` of them over all layers and both lenses.

    Args:
        rise: smallest rise of y since the change began.
        false_alarms: chance of a notice in 64 readings of a model whose alignment does not move.
    """

    name = "trend"
    needs = ("hdi_alignment", "hdi_energy_alignment")
    warm_up: ClassVar[int] = 20
    allowance: ClassVar[float] = 0.5

    def __init__(self, rise: float = 0.05, false_alarms: float = 0.05) -> None:
        self.rise = number("rise of AlignmentTrend", rise, above=0, below=math.inf, example=0.05)
        self.false_alarms = number("false_alarms of AlignmentTrend", false_alarms, above=0, below=1, example=0.05)

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Find the lens in which the change is clearer."""
        found = []
        for lens in _LENSES:
            steps, curve = series.curve(_MEAN[lens])
            if len(curve) <= self.warm_up + 1:
                continue
            y = [_stretch(value) for value in curve]
            if y[-1] - min(y) < self.rise:
                continue
            moves = [later - earlier for earlier, later in itertools.pairwise(y)]
            spread = statistics.stdev(moves[: self.warm_up])
            if not spread > 0:
                continue
            total, start, peak, begun = 0.0, self.warm_up, 0.0, self.warm_up
            for place in range(self.warm_up, len(moves)):
                total += moves[place] / spread - self.allowance
                if total <= 0:
                    total, start = 0.0, place + 1
                if total >= peak:
                    peak, begun = total, start
            if total >= self._limit(series.siblings) and y[-1] - y[begun] >= self.rise:
                found.append((total, lens, steps[begun], curve[begun], curve[-1]))
        if not found:
            return None
        total, lens, since, before, now = max(found)
        if active is not None:
            return active.finding
        return Finding(
            f"the mean alignment rises ({_number(now)}{', weighed by energy' if lens == 'energy' else ''}, "
            f"{_number(before)} before)",
            "notice",
            now,
            None,
            _MEAN[lens],
            since=since,
            certainty="many healthy runs do this",
        )

    def _limit(self, layers: int) -> float:
        k, series = self.allowance, 2 * max(1, layers)
        return math.log(2 * k * k * series * 64 / self.false_alarms) / (2 * k) - 1.166


class SharedDirection(Rule):
    """One direction takes over all heads, late and suddenly: the energy alignment leaves a level that it had kept.

    Healthy heads come to share a direction early in training, as fast and as far. So the level alone says little, and
    this asks for a quiet stretch before: over 20 readings that ended 15 readings ago the alignment moved by at most .2,
    and since then it has risen by .4 or more.

    Args:
        limit: mean alignment in the energy lens.
    """

    name = "shared direction"
    needs = ("hdi_energy_alignment",)
    quiet: ClassVar[int] = 20
    recent: ClassVar[int] = 15
    calm: ClassVar[float] = 0.2
    rise: ClassVar[float] = 0.4

    def __init__(self, limit: float = 0.8) -> None:
        self.limit = number("limit of SharedDirection", limit, above=0, below=1, example=0.8)

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Find a late jump of the energy alignment."""
        now = series.value(_MEAN["energy"])
        if active is not None:
            return active.finding if now >= self.limit - HYSTERESIS else None
        steps, curve = series.curve(_MEAN["energy"])
        before = curve[-(self.quiet + self.recent) - 1 : -self.recent]
        is_told = series.latest.values.get(_MEAN["subspace"], 0) >= _TOGETHER
        if now < self.limit or len(before) <= self.quiet or is_told:
            return None
        if max(before) - min(before) > self.calm or now - max(before) < self.rise:
            return None
        return Finding(
            f"one direction is taking over all heads (mean alignment {_number(now)} weighed by energy, at most "
            f"{_number(max(before))} until step {steps[-self.recent - 1]})",
            "warning",
            now,
            self.limit,
            _MEAN["energy"],
            since=steps[-self.recent - 1],
            certainty=_certainty(self.limit, _TRIED.jump),
            remedy="a lower learning rate, or a look at what the keys of this layer have in common",
        )


class DeadHeads(Rule):
    """Heads whose key weight is all but zero, beside others that are not."""

    name = "dead heads"
    needs = ("hdi_dead_heads",)

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Find dead heads; a layer that starts at zero altogether is given the first reading to leave it."""
        count = int(series.value("hdi_dead_heads"))
        ranks = series.latest.arrays.get("rank", [])
        dead = tuple(head for head, rank in enumerate(ranks) if rank == 0)
        if count == 0 or (len(dead) == len(ranks) > 0 and len(series.rows) == 1):
            return None
        named = _named(dead) if dead else f"{count} heads"
        return Finding(
            f"{named} {'is' if count == 1 else 'are'} dead (the key weight is all but zero)",
            "warning",
            count,
            0,
            "hdi_dead_heads",
            dead,
            series.since(lambda row: row.values.get("hdi_dead_heads", 0) > 0),
            "certain, as read from the weight",
            "less weight decay on the attention, or a reading of its gradients",
        )


class FallingRank(Rule):
    """A head loses directions: its numerical rank has fallen, or its spectrum has become very uneven.

    The unevenness is the spectral flatness of the head (geometric over arithmetic mean of its squared singular values).
    It falls when directions are lost, and only mildly when others grow, as they do in healthy training.

    Args:
        flatness: the flatness that is a warning, if it is a tenth of that of the first reading or less.
    """

    name = "falling rank"
    needs = ("hdi_min_flatness", "hdi_min_rank")
    fall: ClassVar[float] = 0.1

    def __init__(self, flatness: float = 0.005) -> None:
        self.flatness = number("flatness of FallingRank", flatness, above=0, below=1, example=0.005)

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Find the heads that have lost directions since the first reading."""
        now, first = series.latest.arrays, series.first.arrays
        margin = 2 if active else 1
        heads = []
        for head, (after, before) in enumerate(zip(now.get("flatness", ()), first.get("flatness", ()))):
            has_lost_rank = 0 < now["rank"][head] < first["rank"][head]
            is_uneven = 0 < after <= margin * min(self.flatness, self.fall * before)
            if has_lost_rank or is_uneven:
                heads.append(head)
        if not heads:
            return None
        worst = min(heads, key=lambda head: now["flatness"][head])
        return Finding(
            f"{_named(heads)} {'has' if len(heads) == 1 else 'have'} lost directions (head {worst}: spectral flatness "
            f"{now['flatness'][worst]:.1g}, {first['flatness'][worst]:.1g} at step {series.first.step}; effective rank "
            f"{now['effective_rank'][worst]:.1f}, {first['effective_rank'][worst]:.1f} then)",
            "warning",
            now["flatness"][worst],
            self.flatness,
            "hdi_min_flatness",
            tuple(heads),
            None,
            _certainty(-self.flatness, None if _TRIED.rank is None else -_TRIED.rank),
            "a lower learning rate, or less weight decay on the attention",
        )


class NonFinite(Rule):
    """The weights of a layer are no longer numbers."""

    name = "weights not finite"

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Find NaN or infinity in the key weights."""
        if series.latest.absent != NOT_FINITE:
            return None
        last = [row.step for row in series.rows if "hdi" in row.values]
        before = f"; they were at step {last[-1]}" if last else ""
        return Finding(
            f"the key weights hold NaN or infinity{before}",
            "critical",
            certainty="certain, as read from the weights",
            remedy="a checkpoint from before, with gradient clipping or a lower learning rate",
        )


class TiedHeads(Rule):
    """At step 0, heads that are more alike than independent initialisation makes them: copied, tied or trained so.

    The probability bound is that of an initialisation. Whether the weights are fresh or were loaded is not known here,
    so an alignment of one half is asked for as well, because heads of a pretrained model are far from random too, and
    no intervention answers this rule unless it names it.

    Args:
        probability: the largest one that is a warning.
    """

    name = "tied heads"
    needs = ("hdi_worst_pair", "hdi_worst_alignment")
    alignment: ClassVar[float] = 0.5

    def __init__(self, probability: float = 1e-6) -> None:
        self.probability = number("probability of TiedHeads", probability, above=0, below=1, example="1e-6")

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Find the closest pair at step 0; afterwards, tell when it has come apart."""
        alignment = series.value("hdi_worst_alignment")
        if active is not None:
            return active.finding if alignment >= self.alignment - HYSTERESIS else None
        width = series.facts.get("width")
        pair = tuple(series.latest.arrays.get("worst_pair", ()))
        if not _is_fresh(series) or alignment < self.alignment or width is None or len(pair) != 2 or min(pair) < 0:
            return None
        ranks = series.latest.arrays["rank"]
        live = sum(rank > 0 for rank in ranks)
        overlap = series.value("hdi_worst_pair")
        pairs = live * (live - 1) // 2
        chance = chance_of_overlap(overlap, ranks=(ranks[pair[0]], ranks[pair[1]]), width=width, pairs=pairs)
        if chance > self.probability:
            return None
        is_all = series.latest.values.get("hdi_alignment", 0) >= 0.9
        who = "all heads are" if is_all else f"heads {pair[0]} and {pair[1]} are"
        bound = f"{chance:.0e}" if chance > 1e-300 else "1e-300"
        return Finding(
            f"{who} nearly one head where this run begins (overlap {_number(overlap)})",
            "warning",
            overlap,
            None,
            "hdi_worst_pair",
            () if is_all else pair,
            certainty=f"heads that are drawn independently come this close with a probability of at most {bound}, so "
            "these were copied or tied, or trained until they were alike",
            remedy="initialising each head on its own if the model is new; weights that were loaded may be meant so",
        )


def default_rules(thresholds: Thresholds = Thresholds()) -> list[Rule]:
    """Make the rules that are asked by default.

    Args:
        thresholds: their limits.

    Returns:
        The rules.

    Raises:
        MisconfigurationError: if they are no `Thresholds`.

    Example:
        >>> [rule.name for rule in default_rules(Thresholds(trend=None, forecast=None, jump=None, tied=None))]
        ['mean alignment', 'worst pair', 'dead heads', 'falling rank', 'weights not finite']
    """
    if not isinstance(thresholds, Thresholds):
        raise MisconfigurationError(
            f"`thresholds` must be Thresholds, got {shown(thresholds)}: write Thresholds(pair=0.9)."
        )
    limits = thresholds
    rules: list[Rule] = []
    if (limits.mean, limits.energy_mean, limits.critical) != (None, None, None):
        rules.append(MeanAlignment(limits.mean, limits.energy_mean, limits.critical))
    if (limits.pair, limits.energy_pair) != (None, None):
        rules.append(WorstPair(limits.pair, limits.energy_pair))
    if limits.forecast is not None:
        rules.append(AlignmentForecast(limits.forecast))
    if limits.trend is not None:
        rules.append(AlignmentTrend(limits.trend))
    if limits.jump is not None:
        rules.append(SharedDirection(limits.jump))
    rules.append(DeadHeads())
    if limits.rank is not None:
        rules.append(FallingRank(limits.rank))
    rules.append(NonFinite())
    if limits.tied is not None:
        rules.append(TiedHeads(limits.tied))
    return rules


@dataclass(frozen=True)
class _RulesByLayer:
    """The default rules with the limits of a layer; a function that can be sent to other processes."""

    limits: Mapping[str, Mapping[str, float | None]]

    def __call__(self, layer: str) -> list[Rule]:
        chosen = Thresholds()
        for pattern, limits in self.limits.items():
            if fnmatchcase(layer, pattern):
                chosen = replace(chosen, **limits)
        return default_rules(chosen)


def choose_rules(
    rules: Literal["default"] | Sequence[Rule], thresholds: Mapping[str, Mapping[str, float | None]] | None = None
) -> Sequence[Rule] | Callable[[str], Sequence[Rule]]:
    """Check the rules that are asked for, and the limits by layer.

    Args:
        rules: rules, or ``"default"``.
        thresholds: pattern of layer names -> limits (see `Thresholds`); of several patterns that match, later ones
            override earlier ones.

    Returns:
        What `Alerts` takes.

    Raises:
        MisconfigurationError: if something is no rule, two rules have one name, a limit is unknown or cannot be
            reached, or limits are given for rules of your own.

    Example:
        >>> rules_for = choose_rules("default", {"decoder.0.*": {"mean": 0.8}})
        >>> [rule.limits[1] for rule in rules_for("decoder.0.attn") if rule.name == "mean alignment"]
        [('warning', 'subspace', 0.8)]
    """
    if isinstance(rules, str) and rules == "default":
        return _RulesByLayer(check_thresholds(thresholds) or {})
    if thresholds:
        raise MisconfigurationError(
            "`thresholds` are those of the default rules; rules of your own have their limits in their own arguments."
        )
    if not isinstance(rules, list | tuple):
        raise MisconfigurationError(
            f'`alerts` must be "default", None or a list of rules, got {shown(rules)}.'
            + did_you_mean(rules, ["default"])
        )
    for rule in rules:
        check_rule(rule)
    names = [rule.name for rule in rules]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise MisconfigurationError(
            f"Two rules have the name {min(twice)!r}, so their alerts would be mixed up: give one another name."
        )
    return list(rules)


def check_thresholds(thresholds: Any) -> dict[str, dict[str, float | None]] | None:
    """Check limits by layer.

    Args:
        thresholds: pattern of layer names -> limits (see `Thresholds`), or `None`.

    Returns:
        The same.

    Raises:
        MisconfigurationError: if it has another form, or a limit is unknown or cannot be reached.

    Example:
        >>> check_thresholds({"*": {"pair": 0.9}})
        {'*': {'pair': 0.9}}
    """
    known = [item.name for item in fields(Thresholds)]
    if thresholds is None:
        return None
    if isinstance(thresholds, Thresholds):
        changed = {name: value for name in known if (value := getattr(thresholds, name)) != getattr(_TRIED, name)}
        raise MisconfigurationError(f'`thresholds` are given by pattern of layer names: write {{"*": {changed}}}.')
    if not isinstance(thresholds, Mapping):
        raise MisconfigurationError(
            f'`thresholds` must be a dictionary, got {shown(thresholds)}: write {{"*": {{"pair": 0.9}}}}.'
        )
    checked: dict[str, dict[str, float | None]] = {}
    for pattern, limits in thresholds.items():
        if not isinstance(pattern, str):
            raise MisconfigurationError(
                f'`thresholds` must have patterns of layer names as keys, got {shown(pattern)}: write {{"*": ...}}.'
            )
        if not isinstance(limits, Mapping):
            inner = f'{{"{pattern}": {shown(limits)}}}' if pattern in known else '{"pair": 0.9}'
            outer = "*" if pattern in known else pattern
            raise MisconfigurationError(
                f"`thresholds` for {pattern!r} must be a dictionary of limits, got {shown(limits)}: write "
                f'{{"{outer}": {inner}}}.'
            )
        checked[pattern] = {}
        for name, limit in limits.items():
            if name not in known:
                raise MisconfigurationError(
                    f"`thresholds` for {pattern!r} name {shown(name)}, which is none of {', '.join(known)}."
                    f"{did_you_mean(name, known)}"
                )
            checked[pattern][name] = _limit(f'thresholds["{pattern}"]["{name}"]', limit)
    return checked


# --- words and numbers


def _is_fresh(series: Series) -> bool:
    """Tell whether this is the reading at step 0, which `TiedHeads` judges alone."""
    return series.latest.step == 0


def _stands(active: Alert | None, level: Level) -> bool:
    """Tell whether an alert of this level or a more serious one stands."""
    return active is not None and (active.level == level or active.level == "critical")


def _pair(row: Row, lens: Lens) -> tuple[int, ...]:
    return tuple(int(head) for head in row.arrays.get(_WORST_PAIR[lens], ()))


def _named(heads: Sequence[int]) -> str:
    if len(heads) == 1:
        return f"head {heads[0]}"
    return f"heads {', '.join(str(head) for head in heads[:-1])} and {heads[-1]}"


def _number(value: float) -> str:
    """Write a number in [-1, 1] as people do: .93."""
    return f"{value:.2f}".replace("0.", ".", 1) if abs(value) < 0.995 else f"{value:.2f}"


def _before(series: Series) -> Row | None:
    """Find the reading to compare with: ten readings ago, or as far back as there are any."""
    return series.rows[max(0, len(series.rows) - 11)] if len(series.rows) > 1 else None


def _earlier(series: Series, metric: str) -> str:
    row = _before(series)
    if row is None or metric not in row.values:
        return ""
    return f", {_number(row.values[metric])} {series.latest.step - row.step} steps ago"


def _pair_earlier(series: Series, lens: Lens, pair: tuple[int, ...]) -> str:
    row = _before(series)
    if row is None or _WORST[lens] not in row.values:
        return ""
    value, steps = _number(row.values[_WORST[lens]]), series.latest.step - row.step
    # The pair's own value is known where it was the worst already; elsewhere the worst bounds it.
    return f", {value} {steps} steps ago" if _pair(row, lens) == pair else f", no pair above {value} {steps} steps ago"


def _stretch(alignment: float) -> float:
    return -math.log1p(-min(alignment, 1 - 1e-9))


@dataclass(frozen=True)
class _Line:
    """A straight line through ``-log(1 - a)`` over steps: slope, its standard error, and the slopes of the halves."""

    slope: float
    error: float
    early: float
    late: float


def _line(steps: Sequence[int], curve: Sequence[float], readings: int) -> _Line | None:
    if len(curve) < readings:
        return None
    x, y = list(steps[-readings:]), [_stretch(value) for value in curve[-readings:]]
    if x[-1] == x[0]:
        return None
    slope, intercept = statistics.linear_regression(x, y)
    rest = [b - intercept - slope * a for a, b in zip(x, y)]
    squares = math.fsum(value * value for value in rest)
    spread = math.fsum((a - statistics.fmean(x)) ** 2 for a in x)
    correlation = 0.0 if squares == 0 else math.fsum(a * b for a, b in itertools.pairwise(rest)) / squares
    correlation = min(max(correlation, 0.0), 0.99)
    error = math.sqrt(squares / (readings - 2) / spread * (1 + correlation) / (1 - correlation))
    half = readings // 2
    early = statistics.linear_regression(x[:half], y[:half]).slope
    late = statistics.linear_regression(x[half:], y[half:]).slope
    return _Line(slope, error, early, late)
