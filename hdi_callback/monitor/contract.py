"""The contract of a run: what a training computed first, read again at the first readings and each tenth and compared.

What is compared are facts that do not depend on the batch: probabilities, numbers, distances, rows of parameters. A
change is told with before and after, once the next reading has confirmed it; what changes from reading to reading is
taken for a schedule, and named once, until it stands still. A fact that could not be read is no change.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hdi_callback.arguments import listed, quoted
from hdi_callback.attention.discovery.find import TapeReader, layer_name, name_without_wrappers
from hdi_callback.attention.discovery.products import attribute_of
from hdi_callback.attention.layer import ROOT, AttentionLayer
from hdi_callback.attention.tape import Tape
from hdi_callback.checks import Facts, facts_of, joined_name, shown_rows
from hdi_callback.checks.facts import PLURAL, shown_heads
from hdi_callback.checks.positions import turns_of
from hdi_callback.checks.scores import KEPT
from hdi_callback.guard import describe, warn, without_modes
from hdi_callback.monitor.inputs import INPUTS
from hdi_callback.monitor.labels import IGNORED, LABELS, LOSS, PARTLY, TARGET, LabelOffset
from hdi_callback.monitor.operations import GONE, OPERATIONS, loses, operations_of, tell_operations
from hdi_callback.monitor.ranks import number_of_ranks
from hdi_callback.monitor.reading import StepFacts
from hdi_callback.monitor.standstill import CUT_OFF, STILL, UNREAD, UNUSED
from hdi_callback.monitor.training_step import GRADIENTS, PLACES, tell
from hdi_callback.record import Alert, state_from_text, state_to_text

EVERY = 10  # readings from one comparison to the next, but for the first: the sooner, the less may have changed before

NAME = "contract change"
_ACTION = "find what changed it: code, a configuration, a callback, or batches of another kind"
MEANING = (
    "Raised when attention computes something else than in the first forward: what queries see, keys of earlier "
    "forwards, dropout, scale, positions, biases, the rows that heads are made of, or in which order tokens come; "
    "when a module outside attention has lost an operation (a notice of other changes, of dropout and of modules that"
    " run no more); when in the training step gradients begin to add up, or are turned, scaled or clipped to next to "
    "nothing before the optimizer gets them, or rows of weights are old ones in another place; when weights outside "
    "attention no longer move, or the learning rate has run out; or when each position is trained to predict another "
    "token than before, or from the start sees what it is to predict (a notice where the loss is computed "
    "otherwise, or the model is given something else). Read at the first readings, at each tenth and after an alert, "
    "confirmed by the next; a notice of what changes from reading to reading. "
    f"Then {_ACTION}."
)
_FIRST = {1, 2, 4, 7, 12, 14, 16, 18}  # readings after the first; less than half of the first ten, as they cost most
_FEWEST = 4  # forwards from which it is known what varies in them
_ROUNDING = 0.02  # of rotary tables in bf16
_LOOKS = {GRADIENTS: "a step", PLACES: "a step", STILL: "each reading"}  # that values come from, if not a forward
_STEP = "the training step"
_WHOLE = {**dict.fromkeys((*_LOOKS, LABELS, LOSS), _STEP), OPERATIONS: "the forward", INPUTS: "what the model is given"}
_MOST = 4  # changes of a forward that are listed

Key = tuple[str, int, str]  # a layer, which of its calls in one forward, and a term
Clauses = dict[str, tuple[Any, ...]]  # what has changed -> of which heads, none for the whole layer, or of which names
_Change = tuple[Key, str, int, Clauses, bool]  # where, the time in words, its first step, what, and if it is a warning


class Contract:
    """What each attention computes, as it was last read; `is_chosen` says whether a layer is watched."""

    def __init__(self, is_chosen: Callable[[str], bool]) -> None:
        self._is_chosen = is_chosen
        self._latest: dict[Key, tuple[Any, int]] = {}  # value, and the step at which it was read
        self._pending: dict[Key, tuple[Any, int]] = {}  # changes that wait for the next reading
        self._scheduled: set[Key] = set()
        self._unread: set[str] | None = None  # parameters that no compared forward took; none if that is not known
        self._told: set[str] = set()  # layers of which the rule on later tokens has told that they are seen
        self.readings = self._forwards = 0
        self._number = 0  # of the reading that is compared, perhaps by another thread once the next one has begun
        self._has_failed = self._is_wanted = self.is_comparing = False  # the last of the latest reading

    def is_due(self) -> bool:
        """Return whether the forward of the reading that begins is to be written down."""
        self.readings += 1
        is_due = self._is_wanted or self.readings % EVERY == 0 or self.readings in _FIRST or bool(self._pending)
        self._is_wanted, self.is_comparing = False, is_due and not self._has_failed
        return self.is_comparing

    def heed(self, alerts: Iterable[Alert]) -> None:
        """Compare at the next reading after an alert, as this may be why; what a rule has told is not told again."""
        for alert in alerts:
            self._is_wanted |= alert.rule != NAME
            self._told |= set(alert.where) if alert.metric == "attention_ahead" else set()

    def compare(
        self, step: int, read: Sequence[Facts | Tape], no_gradient: Mapping[str, Mapping[str, Tensor]],
        of_steps: Iterable[StepFacts] = (), *arrived: Tensor, before: int | None = None, reading: int,
    ) -> tuple[Alert, ...]:  # fmt: skip
        """Return alerts of what has changed since each layer was last read, by facts, calls, steps and gradients.

        The step that is looked at began at the reading `before`, if there was one; the number of this one is `reading`.
        """
        self._number = reading
        changes: list[_Change] = []
        try:
            with without_modes():  # a model may run under torch.device("meta")
                of_each = [[item] if isinstance(item, Facts) else facts_of(TapeReader(item).finish()) for item in read]
                every = [each for facts in of_each for each in facts]
                numbers, of_training = iter(arrived), dict[Key, Any]()
                for of_step in of_steps:
                    of_training |= of_step.terms(*(next(numbers) for _ in of_step.tensors))
                trained = of_training.pop(("", 0, TARGET), None)
                values = of_training | self._values_of(every, no_gradient)
                values |= {} if trained is None else self._values_of_target(trained, every)
                for tape in (it for it in read if isinstance(it, Tape) and "" in it.training):
                    unread = {*map(name_without_wrappers, tape.unread_parameters())}
                    self._unread = unread if self._unread is None else self._unread & unread
                values |= {key: self._say_unread(values[key]) for key in values if key[2] == STILL}
                values |= self._operations([(it, facts) for it, facts in zip(read, of_each) if isinstance(it, Tape)])
                changes += self._changes(step, step if before is None else before, values)
        except Exception as error:
            self._has_failed = True
            warn(f"Comparing what attention computes with the first forward failed ({describe(error)}).")
        return self._alerts(step, changes)

    def _alerts(self, step: int, changes: Iterable[_Change]) -> tuple[Alert, ...]:
        """Return an alert of each event: what has changed at one time, alike in some layers, or in the whole."""
        # Of a layer, the step or the forward, by time and first step: what, in which layers, and if it is a warning.
        merged: dict[tuple[str, str, int], tuple[Clauses, set[str], set[bool]]] = {}
        for (layer, _, term), when, since, changed, is_warning in changes:
            key = _WHOLE.get(term, layer or _STEP), when, since
            clauses, layers, are_warnings = merged.setdefault(key, ({}, set(), set()))
            layers.add("" if term in {OPERATIONS, LOSS, INPUTS} else layer)
            are_warnings.add(is_warning)
            for text, names in changed.items():
                names = tuple(f"{layer}.{name}".lstrip(".") for name in names) if term in _LOOKS else names
                clauses[text] = (*clauses.get(text, ()), *names)
        whole = _WHOLE.values()
        of_attention = {at for (place, _, at), (*_, each) in merged.items() if place not in whole and any(each)}
        everywhere = {key[0] for key in self._latest if key[2] not in {TARGET, *_WHOLE}}
        events: dict[tuple[str, int, tuple[str, ...], bool], dict[str, tuple[int, ...]]] = {}
        for (place, when, since), (clauses, layers, are_warnings) in merged.items():
            if place not in whole:
                heads = tuple(sorted({head for each in clauses.values() for head in each}))
                event = events.setdefault((f"attention in {{}} {when}", since, tuple(clauses), any(are_warnings)), {})
                event[place] = heads if all(clauses.values()) else ()
            elif place == _STEP or since not in of_attention:  # else it may be what that has told
                is_warning = any(are_warnings) and GONE not in clauses  # adapters may have been merged
                layers = everywhere if "" in layers else layers
                events[f"{place} {when}", since, (*_in_words(clauses),), is_warning] = dict.fromkeys(sorted(layers), ())
        # What is told as a warning is not told again by the loss that rises after it.
        is_told = any(is_warning for *_, is_warning in events)
        return tuple(
            Alert(step, NAME, "warning" if is_warning else "notice", of,
                  f"{when.format(joined_name(list(of)))}: {'; '.join(clauses)}", _ACTION,
                  since=None if when.endswith(_BY_SCHEDULE) or is_told > is_warning else since)
            for (when, since, clauses, is_warning), of in events.items()
        )  # fmt: skip

    def state_dict(self) -> str:
        """Return what was read last, as text, for the first reading of a resumed run."""
        return state_to_text((self._latest, self._scheduled, self._told, self._forwards))

    def load_state_dict(self, state: str) -> None:
        """Compare the next reading with what was read before a checkpoint."""
        values, scheduled, told, self._forwards = state_from_text(state)
        self._latest |= values
        self._scheduled |= scheduled
        self._told |= told

    def _values_of(self, facts: Sequence[Facts], no_gradient: Mapping[str, Mapping[str, Tensor]]) -> dict[Key, Any]:
        values: dict[Key, Any] = {}
        calls: Counter[str] = Counter()
        for each in facts:
            layer = layer_name(each.path)
            of_call = {term: read(each) for term, (read, _) in COMPARED.items()} if self._is_chosen(layer) else {}
            of_call |= {} if self._number else {"earlier": None}  # the first forward has no memory
            values |= {(layer, calls[layer], term): value for term, value in of_call.items() if value is not None}
            calls[layer] += 1
        of_one_key = {layer_name(each.path) for each in facts if each.keys == 1}  # of weight one, whatever its score
        for layer, roles in no_gradient.items():
            # If all of it gets none, it was dropped, or this is no backward.
            unmoved = {"query", "key"} if layer in of_one_key else set[str]()
            roles = {role: dead for role, dead in roles.items() if role not in unmoved}
            heads = {role: tuple(dead.nonzero().flatten().tolist()) for role, dead in roles.items() if bool(dead.any())}
            values[layer, 0, "gradients"] = {} if all(bool(dead.all()) for dead in roles.values()) else heads
            self._latest.setdefault((layer, 0, "gradients"), ({}, 0))
        return values

    def _values_of_target(self, trained: LabelOffset, facts: Sequence[Facts]) -> dict[Key, Clauses]:
        """Return what is wrong with what is trained: of each layer that attends to these tokens, or of the model."""
        sees = {layer_name(each.path): _sees_ahead(each, trained) for each in facts}
        sees = {layer: ahead for layer, ahead in sees.items() if ahead is not None and self._is_chosen(layer)}
        if trained.offset == 1:
            return {(layer, 0, TARGET): {_SEES: ()} if ahead else {} for layer, ahead in {**sees, "": False}.items()}
        is_wrong = trained.offset >= 0 and bool(sees) and not any(sees.values())
        return {("", 0, TARGET): {_NOT_NEXT.format(_token_in_words(trained.offset)): ()} if is_wrong else {}}

    def _say_unread(self, still: Mapping[str, str]) -> dict[str, str]:
        """Return what stands still, and of what no gradient has reached whether a forward takes it at all."""
        unread = self._unread or set()
        return {name: UNREAD if name in unread and text.startswith(CUT_OFF) else text for name, text in still.items()}

    def _operations(self, tapes: Sequence[tuple[Tape, Sequence[Facts]]]) -> dict[Key, Any]:
        """Return the operations outside attention, also of modules that did not run before, or do not any more."""
        self._forwards += bool(tapes)
        values: dict[Key, Any] = {}
        for tape, facts in tapes:
            mode = int("" in tape.training)
            before = {key: at for key, (_, at) in self._latest.items() if key[1:] == (mode, OPERATIONS)}
            for group, modules in [*operations_of(tape, facts).items(), *((key[0], {}) for key in before)]:
                values.setdefault((group, mode, OPERATIONS), {}).update(modules)
                if before:
                    self._latest.setdefault((group, mode, OPERATIONS), ({}, max(before.values())))
        return values

    def _changes(self, of_forward: int, of_step: int, values: Mapping[Key, Any]) -> Iterator[_Change]:
        """Yield each change that the next reading confirms, or that goes on."""
        # What the next reading does not have is forgotten; the next comparison looks for it again.
        looks = {_LOOKS.get(key[2]) for key in values}
        self._pending = {
            key: change for key, change in self._pending.items() if key in values or _LOOKS.get(key[2]) not in looks
        }
        for key, value in values.items():
            term = key[2]
            step = of_step if _LOOKS.get(term) == "a step" else of_forward
            # What may be wrong from the start is compared with nothing.
            before, at = self._latest.setdefault(key, (None if term == TARGET else value, step))
            change = COMPARED[term][1](before, value)
            if key in self._scheduled:
                if self._number % EVERY == 0 and term != OPERATIONS:
                    # What has stood still from comparison to comparison may be told again.
                    self._latest[key] = value, step
                    self._scheduled -= set() if change else {key}
            elif change and key not in self._pending:
                if term == OPERATIONS and self._forwards <= _FEWEST:
                    self._scheduled.add(key)
                else:
                    self._pending[key] = value, step
            else:
                yield from self._confirmed(key, change, (before, at), (value, step))

    def _confirmed(self, key: Key, change: Clauses, before: tuple[Any, int], now: tuple[Any, int]) -> Iterator[_Change]:
        """Yield a change that the last reading has shown as well; one that goes on is taken for a schedule."""
        (layer, _, term), (old, at), (value, step) = key, before, now
        has_gone = key in self._pending and not change
        pending, first = self._pending.pop(key, now)
        # From a number that drifts by less than is told at once, a change is told at last.
        self._latest[key] = old if isinstance(value, float) and not change else value, step
        if (change and COMPARED[term][1](pending, value)) or (term == OPERATIONS and has_gone):
            self._scheduled.add(key)
        is_scheduled = key in self._scheduled
        own = {
            clause.replace(f" {layer}.", " ").strip(): heads for clause, heads in change.items()
            if layer not in self._told or "later tokens" not in clause
        }  # fmt: skip
        if own and not (is_scheduled and term == OPERATIONS):  # experts and dropped layers are in order
            when = f"has changed between steps {at} and {first}" if at < first else f"is so since step {first}"
            is_warning = term not in {INPUTS, LOSS} and (term != OPERATIONS or loses(old, value))
            is_warning &= not is_scheduled and not all(map(_may_be_right, own))
            since = min(first, at + 1)  # the loss may have risen before this reading
            yield key, _BY_SCHEDULE if is_scheduled else when, since, own, is_warning


_BY_SCHEDULE = "changes from reading to reading, as by a schedule"
_SEES = "it sees later tokens, and each position is trained to predict the next one"
_NONE_HIDDEN = "no token is hidden from some queries of a distance any more, as others were in each batch before"
_NOT_NEXT = "each position is trained to predict {}, and not the next one"


@torch.no_grad()
def without_gradient(layers: Iterable[AttentionLayer]) -> dict[str, dict[str, Tensor]]:
    """Return, behind a backward, layer -> role or factor of a sum -> which heads are trained and get no gradient."""
    dead: dict[str, dict[str, Tensor]] = {}
    for layer in layers:
        blank = []  # of each parameter, whether it is all zero, so that others get no gradient
        for role, weight in () if any(each.is_sharded for each in layer.weights.values()) else layer.weights.items():
            factors = [(rows.names[0], rows) for term in weight.terms for rows in term.factors]
            for name, rows in factors if weight.plain is None else [(str(role), weight.plain)]:
                owner, attribute = rows.owners()[0]
                parameter = owner._parameters.get(attribute)
                if parameter is None or rows.recipes or len(rows.names) > 1 or not parameter.is_floating_point():
                    continue
                is_zero = ~rows.of(parameter).flatten(1).any(1)
                blank.append(is_zero.all())
                # On another rank there may be a gradient where here is none.
                if parameter.requires_grad and (parameter.grad is not None or number_of_ranks() == 1):
                    moves = is_zero if parameter.grad is None else rows.of(parameter.grad).flatten(1).any(1) | is_zero
                    dead.setdefault(layer.name, {})[name] = ~moves
        for name, heads in dead.get(layer.name, {}).items():
            dead[layer.name][name] = heads & ~torch.stack(blank).any()
    return dead


# what is compared, and how a change of each is told


def _tell_value(phrase: str) -> Callable[[Any, Any], Clauses]:
    def tell(before: Any, after: Any) -> Clauses:
        is_same = math.isclose(before, after, rel_tol=1e-3) if isinstance(after, float) else before == after
        old, new = (
            f"{value:.4g}" if isinstance(value, float) else "nothing" if value == "" else value
            for value in (before, after)
        )
        return {} if is_same else {f"{phrase} {new}, and {old} before": ()}

    return tell


def _weights(each: Facts) -> str | None:
    if each.reason:
        return each.reason.removeprefix("its ") if "softmax runs over" in each.reason else None
    return "a softmax of a softmax" if each.softmaxes > 1 else each.normaliser


def _roles(each: Facts, roles: Iterable[str]) -> str | None:
    return None if each.reason else " and ".join(PLURAL[role] for role in roles)


def _rows(each: Facts) -> dict[str, list[tuple[str, Tensor]]] | None:
    rows = {role: [(head_rows.name, head_rows.rows) for head_rows in each.rows.get(role, ())] for role in PLURAL}
    return rows if each.rows else None


def _tell_rows(before: Mapping[str, Any], after: Mapping[str, Any]) -> Clauses:
    clauses: Clauses = {}
    for role, old in before.items():
        new, phrase = after[role], "heads enter" if role == "output" else f"{PLURAL[role]} are made by"
        was, now = (" + ".join(attribute_of(name).removesuffix(".weight") for name, _ in maps) for maps in (old, new))
        if was != now and old and (new or role != "output"):
            clauses[f"{phrase} {now or 'no parameter, perhaps by the call before'}, and {was} before"] = ()
        for (_, rows), (_, new_rows) in zip(old, new) if was == now else ():
            if rows.shape == new_rows.shape and not torch.equal(rows, new_rows):
                heads = tuple((rows != new_rows).any(1).nonzero().flatten().tolist())
                moved, still = (shown_rows(each[heads[0]]) for each in (new_rows, rows))
                clauses[f"{phrase} {now} in another order: head {heads[0]} is {moved}, and {still} before"] = heads
    return clauses


def _tell_seen(before: Tensor, after: Tensor) -> Clauses:
    tokens = min(before.shape[1], after.shape[1]) // 2
    shares = torch.broadcast_tensors(*(
        each[:, each.shape[1] // 2 - tokens : each.shape[1] // 2 + tokens + 1] for each in (before, after)
    ))  # fmt: skip
    clauses: dict[str, list[int]] = {}
    for head, (was, now) in enumerate(zip(*shares)):
        if (was[tokens] == 1) != (now[tokens] == 1) and min(was[tokens], now[tokens]) < 0.5:
            clauses.setdefault(f"{'now' if was[tokens] < 1 else 'no longer'} sees the token itself", []).append(head)
        later = [share[:tokens][~share[:tokens].isnan()] for share in (was, now)]
        if bool(later[0].any()) != bool(later[1].any()) and not bool(((later[0] > 0) & (later[0] < 1)).any()):
            clauses.setdefault(f"{'now' if bool(later[1].any()) else 'no longer'} sees later tokens", []).append(head)
        behind = [share[tokens + 1 :] for share in (was, now)]
        behind = [share[~(behind[0] + behind[1]).isnan()] for share in behind]
        is_of_documents = any(bool(((share > 0) & (share < 1)).any()) for share in behind)  # each batch has others
        widths = [int(share.sum()) + 1 for share in behind]
        if widths[0] != widths[1] and not is_of_documents:
            old, new = (f"{width} tokens" if width <= len(behind[0]) else "all tokens before" for width in widths)
            clauses.setdefault(f"sees {new}, and {old} till then", []).append(head)
    count = len(shares[0])
    each = {text: () if len(heads) == count else tuple(heads) for text, heads in clauses.items()}
    return {
        f"{shown_heads(heads)} {text if len(heads) == 1 else text.replace('sees', 'see')}" if heads
        else f"each head {text}": heads for text, heads in each.items()
    }  # fmt: skip


def _hides_by_content(each: Facts) -> bool | None:
    """Return whether a mask hides tokens from some of the queries at a distance, but for documents that are known."""
    if each.distances is None or _hides_documents(each) is not None:
        return None
    return bool(((each.distances > 0) & (each.distances < 1)).any())


def _hides_padding(each: Facts) -> str | None:
    masks = [mask for name, mask in each.padding.items() if "position" not in name and len(mask) > 1]
    masks = [mask for mask in masks if mask.shape[1] == min(each.keys, KEPT) and bool(mask.any() & ~mask.all())]
    if not masks or each.visible is None:
        return None
    hidden = ~each.visible[:, 0].any(-2)
    is_hidden = any(torch.equal(hidden, side) for mask in masks for side in (mask, ~mask))
    return "hidden" if is_hidden else None if bool(hidden.any()) else "seen"


def _hides_documents(each: Facts) -> str | None:
    """Return whether tokens see documents before their own, where positions start again; `None` if that is unknown."""
    moved = next((mask for name, mask in each.padding.items() if "position" in name), None)  # positions that are not 0
    if each.visible is None or moved is None or each.queries != each.keys:
        return None
    visible = each.visible[:, 0]
    moved = moved[:, : visible.shape[-1]]
    number = (~moved).cumsum(1)
    inside = moved & (number > 0)  # padding may have positions of 0, or of what comes before them
    is_earlier_document = (number[:, :, None] > number[:, None]) & inside[:, :, None] & inside[:, None]
    is_alike = len(visible) in {1, len(is_earlier_document)} and is_earlier_document.shape[1:] == visible.shape[1:]
    if not is_alike or not bool(is_earlier_document.any()):
        return None
    return "seen" if bool((is_earlier_document & visible).any()) else "hidden"


def _tell_order(before: Mapping[str, str], after: Mapping[str, str]) -> Clauses:
    changes: dict[tuple[str, str], list[str]] = {}
    for role, order in after.items():
        if order and before.get(role) and order != before[role]:
            changes.setdefault((order, before[role]), []).append(PLURAL[role])
    return {f"tokens of {listed(roles)} come {new}, and {old} before": () for (new, old), roles in changes.items()}


def _tell_turns(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Clauses:
    for role in before.keys() & after.keys():
        old, new = before[role], after[role]
        if old.shape == new.shape and float((old - new).abs().nan_to_num(0).max()) > _ROUNDING:
            return {"rotary positions turn by other angles from token to token: another base, or another scaling": ()}
    return {}


def _tell_bias(before: Tensor, after: Tensor) -> Clauses:
    queries, keys = (min(before.shape[at], after.shape[at]) for at in (-2, -1))
    old, new = torch.broadcast_tensors(*(each[..., :queries, :keys] for each in (before, after)))
    gaps = old - new
    gaps = (gaps - gaps.nanmedian(-1, keepdim=True).values).abs().nan_to_num(0).amax(0)  # no row moves as a whole
    if float(gaps.max()) <= 1e-3 * (1 + float(old.abs().nan_to_num(0).max())):
        return {}
    # Where it is farthest from its row's median, or in another head, it may be as before.
    head, place = divmod(int((old - new).abs().nan_to_num(0).argmax()), queries * keys)
    query, key = divmod(place, keys)
    now, was = (float(each[head, query, key]) for each in (new, old))
    return {f"the bias of token {query} for token {key} is {now:.3g}, and {was:.3g} before": ()}


def _in_words(clauses: Clauses) -> list[str]:
    """Return changes of the training step or the forward as text, of modules without those within them."""
    texts = []
    for phrase, names in clauses.items():
        outer = [name for name in names if not any(name.startswith(f"{other}.") for other in names if other)]
        texts.append(phrase.format(quoted([each or ROOT for each in joined_name(outer).split(", ")])))
    return texts if len(texts) <= _MOST else [*texts[:_MOST], f"and {len(texts) - _MOST} changes more"]


def _token_in_words(state: int | str) -> str:
    if isinstance(state, str):
        return state
    far = f"the token {abs(state)} places {'ahead' if state > 0 else 'back'}"
    return {0: "its own token", 1: "the next token"}.get(state, far)


def _tell_labels(before: int | str, after: int | str) -> Clauses:
    text = f"each position is trained to predict {_token_in_words(after)}, and {_token_in_words(before)} before"
    return {} if before in {after, IGNORED, PARTLY} or after == PARTLY else {text: ()}  # many a batch may be so


def _may_be_right(clause: str) -> bool:
    # A model may shift its tokens itself, rewards of zero train nothing, an output may be unused, documents be long.
    healthy = _NONE_HIDDEN, _NOT_NEXT.format(_token_in_words(0))
    return clause in {*healthy, UNREAD} or IGNORED in clause or UNUSED in clause


def _sees_ahead(each: Facts, trained: LabelOffset) -> bool | None:
    """Return whether a head sees later tokens from half of the trained positions; `None` if it attends to others."""
    visible, count = each.visible, min(each.queries, KEPT)
    is_of_tokens = {*map(id, each.tokens)} >= {*map(id, trained.tokens)} and each.queries == each.keys
    if visible is None or not is_of_tokens or trained.is_trained.shape[1] != count or count < 2:
        return None
    is_trained = trained.is_trained
    is_trained = is_trained if len(visible) in {1, len(is_trained)} else is_trained.all(0, keepdim=True)
    sees = visible.triu(1).any(-1) & is_trained[:, None]
    return bool((2 * sees.sum((0, 2)) > is_trained[:, :-1].expand(len(sees), -1).sum()).any())


def _tell_text(before: str, after: str) -> Clauses:
    return {after: ()} if after not in {"", before} else {}


def _tell_still(before: Mapping[str, str], after: Mapping[str, str]) -> Clauses:
    phrases = [*dict.fromkeys(text for name, text in after.items() if before.get(name) != text)]
    return {phrase: tuple(name for name, text in after.items() if text == phrase) for phrase in phrases}


def _tell_places(before: Mapping[str, str], after: Mapping[str, str]) -> Clauses:
    return {text: () for name, text in after.items() if text and before.get(name, text) != text}


def _tell_gradients(before: Mapping[str, tuple[int, ...]], after: Mapping[str, tuple[int, ...]]) -> Clauses:
    clauses: Clauses = {}
    for name, heads in after.items():
        if set(heads) - set(before.get(name, ())):
            is_role = name in PLURAL
            text = f"{PLURAL[name]} of {shown_heads(heads)} get" if is_role else f" {name} gets"
            clauses[f"{text} exactly no gradient"] = heads if is_role else ()
    return clauses


COMPARED: dict[str, tuple[Callable[[Facts], Any], Callable[[Any, Any], Clauses]]] = {
    "dropout": (lambda each: each.dropout if each.is_training else None, _tell_value("dropout is")),
    "scale": (lambda each: each.scale, _tell_value("scores are scaled by")),
    "weights": (_weights, _tell_value("what makes weights of scores is")),
    "rows": (_rows, _tell_rows),
    "order": (lambda each: dict(each.order), _tell_order),
    "seen": (lambda each: each.distances, _tell_seen),
    "mask": (_hides_by_content, lambda before, after: {_NONE_HIDDEN: ()} if before and not after else {}),
    "padding": (_hides_padding, _tell_value("padding is")),
    "earlier": (lambda each: each.earlier, _tell_value("tensors from before the forward in keys, and no queries, are")),
    "documents": (_hides_documents, _tell_value("documents before the own one, by positions that start again, are")),
    "rotated": (lambda each: _roles(each, filter(each.pairs.get, PLURAL)), _tell_value("positions turn")),
    "turns": (lambda each: {role: turns_of(table) for role, table in each.cosines.items()}, _tell_turns),
    "shift": (lambda each: each.shift, _tell_value("the shift of positions from queries to keys is")),
    "curves": (lambda each: None if each.reason else ", ".join(each.curves), _tell_value("scores are bent by")),
    "bias": (lambda each: each.bias, _tell_bias),
    "normed": (lambda each: _roles(each, each.normed), _tell_value("what has a norm in the attention is")),
    "block": (lambda each: each.block, _tell_value("the block is")),
    "gradients": (lambda each: None, _tell_gradients),
    GRADIENTS: (lambda each: None, tell),
    PLACES: (lambda each: None, _tell_places),
    STILL: (lambda each: None, _tell_still),
    OPERATIONS: (lambda each: None, tell_operations),
    LABELS: (lambda each: None, _tell_labels),
    LOSS: (lambda each: None, _tell_text),
    INPUTS: (lambda each: None, _tell_text),
    TARGET: (lambda each: None, lambda before, after: after if before is None else {}),
}
