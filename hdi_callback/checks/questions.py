"""Questions that any model is asked by numbers: change what it is given, and look which outputs change.

A question has conditions; where they do not hold it is not asked, and the reason is told. Nothing here depends on how
code is written, and nothing is known of its cause: `diagnoses` explain.
"""

from __future__ import annotations

import gc
import random
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from inspect import isfunction
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hdi_callback.arguments import listed
from hdi_callback.attention.discovery.heads import IN
from hdi_callback.attention.kept_state import names_in
from hdi_callback.attention.layer import ROOT
from hdi_callback.attention.operations import DROPOUTS
from hdi_callback.attention.tape import Tape, walk_back
from hdi_callback.checks.diagnoses import Diagnosis, Verdict
from hdi_callback.checks.door import Changes, Door, Inputs, NotAskedError, Place, by_token, tensors_in
from hdi_callback.checks.facts import Facts, shown_rows

_MOST_BYTES = 2**31  # of parameters whose gradients are asked for

Answer = tuple[Verdict, str, str]
"""Verdict, text, and the first module whose output shows it and whose inputs do not; "" if it is not known."""
Question = Callable[[Door, Inputs, Sequence[Facts]], Iterator[Answer]]


def ask_model(
    model: nn.Module, forward: Callable[[], object], facts: Sequence[Facts]
) -> tuple[list[Diagnosis], dict[str, str]]:
    """Return what is broken, and which questions were not asked and why; within `nothing_remains`."""
    broken: list[Diagnosis] = []
    if any(parameter.is_meta or type(parameter.data) is not Tensor for parameter in model.parameters()):
        return broken, {"all": "parameters are sharded, quantised or on no device"}
    not_asked: dict[str, str] = {}
    lines = {each.path: each.line for each in facts}
    try:
        door = Door(model, forward)
        inputs = Inputs(door)
    except Exception as error:
        return broken, {"all": str(error).partition("\n")[0]}
    for question in QUESTIONS:
        name = question.__name__.replace("_", " ")
        try:
            for verdict, text, layer in question(door, inputs, facts):
                broken.append(Diagnosis(layer or ROOT, name, verdict, text, lines.get(layer, "")))
        except NotAskedError as reason:
            not_asked[name] = str(reason)
        except Exception as error:  # the model takes no other values
            not_asked[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if question is finite and broken:
            break
    return broken, not_asked


# the questions, of which each says "wrong" only of what no design asks for


def finite(door: Door, inputs: Inputs, facts: Sequence[Facts]) -> Iterator[Answer]:
    """Outputs are numbers."""
    if not bool(door.base.isnan().any()):
        return
    calls = door.record({})
    are_nan = [[any(bool(tensor.isnan().any()) for tensor in tensors) for tensors in call[1:]] for call in calls]
    first = next((door.names[call[0]] for call, states in zip(calls, are_nan) if states == [False, True]), "")
    text = f"{float(door.base.isnan().float().mean()):.0%} of the outputs are NaN; scores of which all are -inf, or "
    text += "one is +inf, give that in a softmax: hide with a finite number, and let each query see a key"
    yield "wrong", text, first


def same_twice(door: Door, inputs: Inputs, facts: Sequence[Facts]) -> Iterator[Answer]:
    """Two forwards of one batch in evaluation mode give the same."""
    gap = door.differ(door.ask(), door.base)
    if gap <= 3e-4:
        door.noise = gap
        return
    door.is_random = True
    outputs: list[Tensor] = []
    for _ in range(2):
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(0)
        with Tape(door.model) as tape:
            outputs.append(door.ask())
        is_seeded = torch.Tag.nondeterministic_seeded
        drawn = {step.op for step in tape.steps if is_seeded in getattr(step.function, "tags", ())}
    text = f"two forwards of one batch in evaluation mode differ by {gap:.2g}"
    # What settles at the second forward is no number that is drawn.
    is_alike = door.differ(*outputs) <= 3e-4 and (drawn or door.differ(door.ask(), outputs[0]) > 3e-4)
    if not is_alike:
        text += ", and not by random numbers: something stays from the forward before"
    elif drawn & (DROPOUTS | {"bernoulli"}):
        text += ", as dropout runs; write F.dropout(x, p, self.training), or dropout_p=p if self.training else 0"
    else:
        raise NotAskedError(f"the forward draws random numbers ({', '.join(sorted(drawn)) or 'not by torch'})")
    yield "wrong", text, door.first(door.record({}), door.record({}))


def samples(door: Door, inputs: Inputs, facts: Sequence[Facts]) -> Iterator[Answer]:
    """A sample depends neither on the others nor on its place: the first one is changed, and all are moved."""
    if door.is_random or not inputs.main:
        raise NotAskedError("forwards are random" if door.is_random else "nothing goes in whose values can be changed")
    failed: tuple[float, int, Tensor, list[int], dict[int, Tensor]] | None = None
    for axis in (0, 1):
        sizes = [door.leaves[at].shape[axis] if door.leaves[at].dim() > axis else 0 for at in door.inputs]
        count = door.leaves[inputs.main[0]].shape[axis]
        if door.base.dim() <= axis or door.base.shape[axis] != count:
            continue
        if count == 1 and not axis:
            door.axis = 0  # there is nothing that it could mix with
        if count < 2 or (axis == 0 and set(sizes) != {count}):
            raise NotAskedError("one sample" if count < 2 else "inputs have different first axes")
        alone = {at: inputs.changed(at, _along(axis, 0)) for at in inputs.main}
        fits = [at for at, size in zip(door.inputs, sizes) if size == count]
        every = torch.arange(count, device="cpu")
        for order in (every.flip(0), every.roll(1)):  # the first leaves the middle, and the second what turns with it
            moved = {at: alone.get(at, door.leaves[at])[_along(axis, order)] for at in fits}
            output = door.ask(moved)
            if output.shape != door.base.shape:
                raise NotAskedError("the shape of the output changes with the samples")
            output = output[_along(axis, order.argsort())]
            gap = door.differ(output.narrow(axis, 1, count - 1), door.base.narrow(axis, 1, count - 1))
            if gap > door.tolerance:
                failed = failed or (gap, axis, order, fits, alone)
                break
        else:
            door.axis = axis
            return
    if failed is None:
        raise NotAskedError("outputs are not by sample")
    gap, axis, order, fits, alone = failed
    back, unchanged = order.argsort(), order.sort().values[1:]

    def place(samples: Tensor) -> Callable[[Tensor], Any]:
        at = _along(axis, samples)
        return lambda tensor: at if tensor.dim() > axis and tensor.shape[axis] == len(order) else None

    layer = door.first(door.record({}, place(unchanged)), door.record(alone, place(unchanged)))
    why = "change with the other samples of the batch: heads, tokens or a mask of one are read for another; keep the "
    why += "batch as an axis of its own in each view and transpose"
    moved = {at: door.leaves[at][_along(axis, order)] for at in fits}
    if not layer and door.differ(door.ask(moved)[_along(axis, back)], door.base) > door.tolerance:
        # Nothing goes from sample to sample: a place has a value of its own.
        why = "depend on its place in the batch: positions, or a mask, run along the batch; let them run along tokens"
        layer = door.first(door.record({}, place(order.sort().values)), door.record(moved, place(back)))
    yield "wrong", f"outputs of a sample {why} (by {gap:.2g})", layer


def _along(axis: int, samples: Any) -> tuple[Any, ...]:
    return (*(slice(None),) * axis, samples)


def later_tokens(door: Door, inputs: Inputs, facts: Sequence[Facts]) -> Iterator[Answer]:
    """Tokens do not change what is put out before them, where masks, labels or the same without padding say so."""
    door, main, count = inputs.sequence(facts)
    x = door.leaves[main]
    pads = inputs.pads.get(main)
    modules = map(door.model.get_submodule, (each.path for each in facts))
    declared = {getattr(module, "is_causal", getattr(module, "causal", None)) for module in modules}
    reasons = {
        "every mask is causal: what else mixes tokens has to be": bool(facts) and all(each.is_causal for each in facts),
        "labels are the tokens, or those that come next: hide what is true in ones(T, T).triu(1)": any(
            inputs.is_moved(x, door.leaves[at]) for at in inputs.labels if x.dim() == 2
        ),
        "each attention is declared as causal; combine that with a mask": declared == {True},
        "what fills the empty cache that is given must not depend on later ones": any(
            not door.leaves[at].numel() for at in inputs.caches
        ),
    }
    why = next((reason for reason, holds in reasons.items() if holds), "")
    if not why:
        raise NotAskedError("neither masks nor labels say that it predicts the next token: give labels with the batch")

    def leak(at: int) -> tuple[float, int, Changes]:
        changes = {main: torch.cat([x[:, :at], inputs.changed(main, ...)[:, at:]], 1)}
        real = torch.ones_like(door.base[..., 0], dtype=torch.bool) if pads is None else ~pads
        real = real & (torch.arange(count, device=real.device) < at)
        return door.differ(door.ask(changes)[real], door.base[real]), at, changes

    worst, at, changes = max(map(leak, dict.fromkeys((count // 2, count - 1))), key=lambda each: each[0])
    if worst <= door.tolerance:
        return
    place = by_token(door, count, slice(None), slice(0, at))
    layer = door.first(door.record({}, place), door.record(changes, place))
    yield "wrong", f"tokens from {at} on change the outputs before them (by {worst:.2g}), though {why}", layer


def source(door: Door, inputs: Inputs, facts: Sequence[Facts]) -> Iterator[Answer]:
    """Of two sequences both reach the outputs, one of them from left to right, and the other hidden from no token."""
    if not inputs.is_pair or door.is_random or door.axis != 0 or door.base.dim() < 3:
        raise NotAskedError("not two sequences of tokens go in")
    is_encoder_decoder = getattr(getattr(door.model, "config", None), "is_encoder_decoder", False)
    for at in inputs.tokens if len(inputs.tokens) == 2 and (door.outputs == 1 or is_encoder_decoder) else ():
        if torch.equal(door.ask({at: inputs.changed(at, ...)}), door.base):
            name = door.label[at] or f"the sequence {inputs.main.index(at)}"
            yield "wrong", f"{name} changes no output: no attention takes its keys and values of it; pass it to one", ""
            return
    causal = [each.path for each in facts if each.is_causal and each.path]
    if not causal:
        raise NotAskedError("no mask says that there is a decoder")
    ends = {at: inputs.changed(at, (slice(None), -1)) for at in inputs.main}
    aligned = [at for at in inputs.main if door.leaves[at].shape[1] == door.base.shape[1]]
    targets = [
        at for at in aligned if door.differ(door.ask({at: ends[at]})[:, :-1], door.base[:, :-1]) <= door.tolerance
    ]
    if len(targets) > 1 or not aligned:
        raise NotAskedError("both sequences read from left to right")
    target = (targets or inputs.main)[-1]
    widths = {each.features for each in facts}  # of what is no mask, and no bias
    by_features = lambda tensor: ... if tensor.dim() == 3 and tensor.shape[-1] in widths else None  # noqa: E731
    runs = [door.record(changes, by_features, among=causal) for changes in ({}, {target: inputs.changed(target, ...)})]
    reads_target = {
        door.names[module]: {not torch.equal(*pair) for pair in zip(before, after)}
        for (module, before, _), (_, after, _) in zip(*runs)
    }
    if not any(True in states for states in reads_target.values()):
        raise NotAskedError("no mask says that there is a decoder")
    if not targets:
        place = by_token(door, door.base.shape[1], ..., slice(0, -1))
        layer = door.first(door.record({}, place), door.record({target: ends[target]}, place))
        text = "the last token of either sequence changes the outputs before it: make queries of the target alone"
        yield "wrong", text, layer
        return
    for path in (path for path, states in reads_target.items() if len(states) > 1):
        text = "later tokens of the source are hidden, as by the causal mask of the target: give it that of the source"
        yield "wrong", text, path


def registered(door: Door, inputs: Inputs, facts: Sequence[Facts]) -> Iterator[Answer]:
    """What an attention holds in a list or a dict is registered, to be trained and saved, and each layer is its own."""
    own = {id(parameter) for parameter in door.model.parameters()}
    paths = {each.path for each in facts}
    for module, name in door.names.items():
        for attribute, value in vars(module).items() if name in paths else ():
            held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
            lost = [each for each in held if isinstance(each, nn.Module) and not attribute.startswith("_")]
            if any(parameter.requires_grad and id(parameter) not in own for m in lost for parameter in m.parameters()):
                text = f"{attribute} is a Python {type(value).__name__} of {len(lost)} modules, and registers none: "
                yield "wrong", f"{text}they are neither trained nor saved; write nn.ModuleList", name
        layers = list(module) if isinstance(module, (nn.ModuleList, nn.Sequential)) else []
        again = next((at for at, layer in enumerate(layers) if layers.count(layer) > 1), -1)
        first = f"{name}.{again}".removeprefix(".")
        if any(f"{path}.".startswith(f"{first}.") for path in paths):
            text = f"{layers.count(layers[again])} of {len(layers)} layers in a row are one module, and so share their "
            yield "odd", f"{text}weights; make one for each: [Layer() for _ in range(n)]", first


def used(door: Door, inputs: Inputs, facts: Sequence[Facts]) -> Iterator[Answer]:
    """What a module returns in the block of an attention reaches an output."""
    calls: list[tuple[nn.Module, Any]] = []
    with torch.enable_grad(), door.hooked(lambda module, args, output: calls.append((module, output))):
        results = [door.forward()]
    results += [output for module, output in calls if module is door.outlet]
    ends = [tensor.grad_fn for tensor in tensors_in(results) if tensor.grad_fn is not None]
    nodes = list(walk_back(ends, lambda node: [at for at, _ in node.next_functions if at]))
    if not nodes or any("Checkpoint" in node.name() for node in nodes):
        raise NotAskedError("outputs have no graph, or checkpoints cut it")
    reached = {id(getattr(node, "variable", None)) for node in nodes}
    idle = [
        module for module in dict.fromkeys(module for module, _ in calls)
        if any(parameter.requires_grad for parameter in module.parameters())
        and reached.isdisjoint(map(id, module.parameters())) and _is_in_block(door, module, facts, reached)
    ]  # fmt: skip
    with ExitStack() as stack:  # what is rounded, or chosen by, has no gradient either
        for module in idle:
            stack.callback(module.register_forward_hook(_draw).remove)
        is_used = not idle or not torch.equal(door.ask(), door.base)
    if not is_used:
        names = dict.fromkeys(re.sub(r"\d+", "*", door.names[module]) for module in idle)
        text = f"no output is made of what {listed(list(names))} return: the result is discarded, as where another "
        yield "odd", f"{text}variable is passed on; use it or drop it", door.names[idle[0]]


def _draw(module: nn.Module, args: Any, output: Any) -> Any:
    return tree_map_only(Tensor, lambda leaf: torch.randn_like(leaf) if leaf.is_floating_point() else leaf, output)


def _is_in_block(door: Door, module: nn.Module, facts: Sequence[Facts], reached: set[int]) -> bool:
    """Whether the nearest part around a module in which attention runs has one attention, and other parts are used."""
    parent = door.names[module]
    while parent:
        parent = parent.rpartition(".")[0]
        prefix = parent and f"{parent}."
        if within := sum(f"{each.path}.".startswith(prefix) for each in facts):
            return within == 1 and not reached.isdisjoint(map(id, door.model.get_submodule(parent).parameters()))
    return False


def token_before(door: Door, inputs: Inputs, facts: Sequence[Facts]) -> Iterator[Answer]:
    """The token before the last one changes the last output."""
    door, main, count = inputs.sequence(facts)
    if not facts or any(each.hidden is None for each in facts):
        raise NotAskedError("masks are not known")
    backward = (each.seen is not None and not bool(each.seen[0].any()) for each in facts)
    if any(backward) or any(bool(each.sees_single_key.any()) for each in facts):
        raise NotAskedError("a mask reads from right to left, or windows are of one token")
    pads = inputs.pads.get(main)
    row = 0 if pads is None else int((~pads).sum(1).argmax())
    last = count - 1 if pads is None else int((~pads[row]).nonzero().max())
    if last < 3 or (pads is not None and bool(pads[row, last - 3 : last].any())):
        raise NotAskedError("too few tokens")
    changes = {main: inputs.changed(main, (slice(None), last - 1))}
    if torch.equal(door.ask(changes)[row, last], door.base[row, last]):
        nearest = {each.path: each.seen[0][:, 0] if each.seen is not None else torch.zeros(1) for each in facts}
        layer = next((path for path, shares in nearest.items() if not bool((shares == 1).all())), "")
        text = f"token {last} does not see token {last - 1}, the one before it: where keys are longer than queries, a "
        text += "causal mask has to be aligned at the end; a mask may also be inverted"
        yield "wrong", text, layer


def order(door: Door, inputs: Inputs, facts: Sequence[Facts]) -> Iterator[Answer]:
    """Swapped tokens are more than swapped outputs, where no mask shows an order."""
    door, main, count = inputs.sequence(facts)
    is_ordered = not facts or any(each.is_causal is not False for each in facts)
    if inputs.positions or inputs.pads or main not in inputs.tokens or is_ordered:
        raise NotAskedError("positions or padding are given, or a mask shows an order")
    swap, x = torch.arange(count), door.leaves[main]
    swap[0], swap[count // 2] = count // 2, 0
    is_moved = not torch.equal(x[:, swap], x)
    if door.base.dtype not in {torch.float32, torch.float64}:
        raise NotAskedError("rounding would hide small positions")
    if is_moved and door.differ(door.ask({main: x[:, swap]}), door.base[:, swap]) <= max(1e-5, 30 * door.noise):
        text = "the order of tokens is not seen: swapped tokens merely swap their outputs; positions are missing, or "
        yield "wrong", f"{text}run along another axis; add them to the tokens", ""


def padding(door: Door, inputs: Inputs, facts: Sequence[Facts]) -> Iterator[Answer]:
    """What stands at padding changes nothing for real tokens, where masks show it."""
    main = next((at for at in inputs.tokens if at in inputs.pads), None)
    if main is None:
        raise NotAskedError("no padding of tokens in this batch")
    pads = inputs.pads[main]
    if not inputs.is_pair and any(0 < each.keys < pads.shape[1] for each in facts):
        raise NotAskedError("tokens are pooled")
    if not inputs.is_pair or door.is_random or door.axis != 0:
        door, main, _ = inputs.sequence(facts)
    real = ~pads if pads.shape == door.base.shape[:2] else torch.ones_like(door.base[..., 0], dtype=torch.bool)
    gap = door.differ(door.ask({}, _noise_at_padding(door, pads, main))[real], door.base[real])
    if gap <= door.tolerance:
        return
    place = lambda tensor: real if tensor.dim() > 2 and tensor.shape[:2] == real.shape else None  # noqa: E731
    layer = door.first(door.record({}, place), door.record({}, place, _noise_at_padding(door, pads, main)))
    door.sees_padding = True
    is_masked = any(at in inputs.pads for at in inputs.masks)
    mask_of = {each.path: each.hidden for each in facts if each.hidden is not None and each.hidden.dim() == 4}
    masks = {path: mask.all(-2) for path, mask in mask_of.items() if mask.shape[-1] > 1}
    hidden = {path for path, mask in masks.items() if torch.equal(mask[:, 0], pads[:, : mask.shape[-1]].cpu())}
    is_attention = any(  # one that does hide it has something else that carries it, as the filters of ConvBERT
        f"{each.path}.".startswith(f"{layer}.") or layer.startswith(f"{each.path}.")
        for each in facts if each.path not in hidden
    )  # fmt: skip
    text = f"what stands at padding changes the outputs of real tokens (by {gap:.2g}), "
    if layer and is_attention and is_masked:  # else a filter, a pool or a norm over tokens carries it
        yield "wrong", f"{text}though a mask of it is given: hide its keys by that", layer
    elif not is_masked:
        with suppress(Exception):  # a mask may be made of zeros at padding; some models take no shorter rows
            alone, cut, _, _ = _without_padding(door, inputs, main)
            if door.differ(door.ask(alone), door.base[cut(door.base)]) <= door.tolerance:
                return
        yield "odd", f"{text}and no mask is given: pass attention_mask, or hide its keys", layer


def padding_cut_off(door: Door, inputs: Inputs, facts: Sequence[Facts]) -> Iterator[Answer]:
    """A row alone, without the padding at its end, gives the same."""
    main = [at for at in inputs.main if at in inputs.pads]
    if len(main) != 1 or door.is_random or door.axis != 0 or door.sees_padding:
        raise NotAskedError("not one sequence alone has padding, or it is told already")
    changes, cut, row, real = _without_padding(door, inputs, main[0])
    pads = inputs.pads[main[0]]
    output, before = door.ask(changes), door.base[cut(door.base)]
    if output.shape != before.shape:
        raise NotAskedError("the length of the output is another one")
    gap = door.differ(output, before)
    if gap <= door.tolerance:
        return
    place = lambda tensor: cut(tensor) if tensor.dim() in {2, 3} and len(tensor) in {1, len(pads)} else None  # noqa: E731
    calls = door.record({}, place)
    layer = door.first(calls, door.record(changes, place))
    masks = [each.visible for each in facts if each.path == layer and each.keys == len(pads[0])]
    text = f"a row without its padding gives other outputs (by {gap:.2g}): padding takes part in "
    outputs = [before, *(t for m, _, out in calls if layer == (door.names[m] or type(m).__name__) for t in out)]
    if any(mask is not None and bool(mask[min(row, len(mask) - 1), ..., real:].any()) for mask in masks):
        verdict: Verdict = "wrong" if any(at in inputs.pads for at in inputs.masks) else "odd"
        yield verdict, f"{text}the softmax, where zeros have a weight too; hide its keys by a mask", layer
    elif all(tensor.shape[1:2] != (real,) for tensor in outputs):
        yield "odd", f"{text}what pools tokens; hide it there by the mask", layer


def _without_padding(door: Door, inputs: Inputs, main: int) -> tuple[Changes, Callable[[Tensor], Any], int, int]:
    """Return inputs of one row alone without the padding at its end, what of a tensor is left, the row, its length."""
    pads = inputs.pads[main]
    row, count = int(pads.sum(1).argmax()), pads.shape[1]
    real = int((~pads[row]).sum())
    others = (door.leaves[at].shape[1:] for at in door.inputs if at not in inputs.pads)
    if real < 2 or bool(pads[row, :real].any()) or any(count in shape for shape in others):
        raise NotAskedError("padding is not at the end alone, or another input is as long")

    def cut(tensor: Tensor) -> tuple[slice, ...]:
        alone = slice(row, row + 1) if len(tensor) > 1 else slice(1)
        return (alone, slice(real)) if tensor.shape[1:2] == (count,) else (alone,)

    return {at: door.leaves[at][cut(door.leaves[at])] for at in door.inputs}, cut, row, real


def mask_of_nothing(door: Door, inputs: Inputs, facts: Sequence[Facts]) -> Iterator[Answer]:
    """A mask of padding that hides nothing is as no mask."""
    door, _, count = inputs.sequence(facts)
    masks = [at for at in inputs.masks if at in inputs.pads]
    if not masks:
        raise NotAskedError("no mask of padding is given")
    real = inputs.unpadded()
    unmasked: Changes = {**real, **dict.fromkeys(masks)}
    gap = door.differ(door.ask(unmasked), door.ask(real))
    if gap > door.tolerance:
        place = by_token(door, count, ...)
        text = f"a mask of padding that hides nothing changes the outputs (by {gap:.2g}): it takes the place of "
        layer = door.first(door.record(real, place), door.record(unmasked, place))
        yield "wrong", f"{text}another mask, as the causal one; combine both", layer


@contextmanager
def _noise_at_padding(door: Door, pads: Tensor, main: int) -> Iterator[None]:
    """Put noise on what an embedding gives for padding: the ids stay, as masks may be made of them."""
    x, hits = door.leaves[main], []

    def disturb(module: nn.Module, args: Any, output: Any) -> Any:
        if not (args and isinstance(args[0], Tensor) and args[0].shape == x.shape and torch.equal(args[0], x)):
            return None
        hits.append(True)
        noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output) * output.std()
        return torch.where(pads[..., None], output + noise, output)

    with ExitStack() as stack:
        for module in door.names:
            if isinstance(module, nn.Embedding):
                stack.callback(module.register_forward_hook(disturb).remove)
        yield
    if not hits:
        raise NotAskedError("no embedding takes the tokens")


def packed(door: Door, inputs: Inputs, facts: Sequence[Facts]) -> Iterator[Answer]:
    """Documents, or graphs, that lie in one row do not see each other."""
    nodes = [at for at in inputs.floats if door.leaves[at].dim() == 2]
    graphs = _numbers_of_graphs(door, len(door.leaves[nodes[0]])) if nodes and not door.is_random else None
    if graphs is not None and len(door.base) in {len(graphs), int(graphs.max()) + 1}:
        first: Any
        main, first, kind = nodes[0], graphs == 0, "graph"
        behind: Any = ~first if len(door.base) == len(graphs) else slice(1, None)
        place: Place = lambda tensor: ~first if tensor.dim() > 1 and len(tensor) == len(first) else None  # noqa: E731
    else:
        door, main, row, at = _first_document(door, inputs, facts)
        first, behind, kind = (row, slice(0, at)), (row, slice(at, None)), "document"
        place = by_token(door, door.leaves[main].shape[1], *behind)
    changes = {main: inputs.changed(main, first)}
    gap = door.differ(door.ask(changes)[behind], door.base[behind])
    if gap > door.tolerance:
        layer = door.first(door.record({}, place), door.record(changes, place))
        text = f"of several {kind}s in one row the first changes the outputs of others (by {gap:.2g}): they see each "
        yield "wrong", f"{text}other; give a mask of {kind}s, and hide by it before the softmax", layer


def _first_document(door: Door, inputs: Inputs, facts: Sequence[Facts]) -> tuple[Door, int, int, int]:
    """Return door, tokens, a row and where in it the second document begins."""
    door, main, count = inputs.sequence(facts)
    at_tokens = torch.arange(count, device=door.base.device)
    tables = [door.leaves[at] for at in inputs.positions if door.leaves[at].shape == (len(door.base), count)]
    ends = [door.leaves[at] for at in door.inputs if _are_ends(door.leaves[at], count) and len(door.base) == 1]
    starts = [*(table == 0 for table in tables), *(torch.isin(at_tokens, each.to(at_tokens))[None] for each in ends)]
    starts = [each[:, 2:] for each in starts if bool(each[:, 2:].any())]
    if not starts or inputs.pads:
        raise NotAskedError("no document or graph begins behind the first token, or there is padding")
    row = int(starts[0].any(1).nonzero()[0])
    return door, main, row, int(starts[0][row].nonzero()[0]) + 2


def _numbers_of_graphs(door: Door, count: int) -> Tensor | None:
    """Return the number of the graph of each node in a row, as `batch` or the ends of graphs say it."""
    for at in door.inputs:
        table: Tensor = door.leaves[at]
        if _are_ends(table, count):
            return torch.bucketize(torch.arange(count).to(table), table[1:], right=True)
        is_named = "batch" in door.label[at]  # others may be places, labels or kinds
        is_whole = is_named and table.shape == (count,) and table.dtype in {torch.int32, torch.int64}
        if is_whole and int(table[0]) == 0 < int(table[-1]) and set(table.diff().tolist()) == {0, 1}:
            return table
    return None


def _are_ends(tensor: Tensor, count: int) -> bool:
    """Whether numbers are where sequences in a row end, from 0 on, as `cu_seqlens` are."""
    is_whole = tensor.dim() == 1 and len(tensor) > 2 and tensor.dtype in {torch.int32, torch.int64}
    return is_whole and int(tensor[0]) == 0 and int(tensor[-1]) == count and bool((tensor.diff() > 0).all())


def positions(door: Door, inputs: Inputs, facts: Sequence[Facts]) -> Iterator[Answer]:
    """Positions that are given are read."""
    door, _, count = inputs.sequence(facts)
    at = next((at for at in inputs.positions if door.leaves[at].shape[1] == count), None)
    if at is None:
        raise NotAskedError("no positions are given")
    table = door.leaves[at]
    # Of two equal positions a swap would change nothing.
    farthest = (table - table[:, :1]).abs().argmax(1, keepdim=True)
    swapped = table.scatter(1, farthest, table[:, :1])
    swapped[:, :1] = table.gather(1, farthest)
    if torch.equal(door.ask({at: swapped}), door.base):
        name = door.label[at] or "the input that counts"
        yield "odd", f"{name} changes nothing: positions are received from elsewhere; pass these on, or give none", ""


def gradients(door: Door, inputs: Inputs, facts: Sequence[Facts]) -> Iterator[Answer]:
    """Each parameter of an attention gets a gradient, in evaluation or in training mode, and so do its rows."""
    model = door.model
    trained = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.is_floating_point()
    }
    maps = {rows.name for each in facts for listed in each.rows.values() for rows in listed}
    read = {each.path for each in facts if each.rows and each.keys > 1}
    paths = read | {each.path for each in facts if not each.rows and each.keys != 1}
    inside = {  # of an attention in the root its maps alone: the rest may be anything
        name: path for path in sorted(paths, key=len) for name in trained
        if (name.startswith(f"{path}.") if path else name in maps)
    }  # fmt: skip
    free: dict[str, set[int]] = {}  # rows of heads that see a single key alone: its weight is 1 whatever they are
    for is_single, each, role in product((True, False), facts, ("query", "key")):
        for rows in each.rows.get(role, ()):
            at = set(rows.rows[each.sees_single_key == is_single].flatten().tolist())
            free[rows.name] = free.get(rows.name, set()) | at if is_single else free[rows.name] - at
    every = [name for name in trained if name in maps or any(name.startswith(f"{each.path}.") for each in facts)]
    size = sum(parameter.nbytes for parameter in trained.values())
    if not every or size > _MOST_BYTES:
        raise NotAskedError("no attention is trained" if not every else f"they take {size / 2**30:.1f} GiB")
    unread = tuple(f"{each.path}." for each in facts if not each.rows and each.path)
    matrices = maps | {name for name in inside if name.startswith(unread) and trained[name].dim() > 1}
    zeros = [name for name, value in trained.items() if not bool(value.any())]
    zero_maps = {name for name in inside if name in zeros and trained[name].dim() > 1}
    runs: list[dict[str, Tensor]] = []  # of gradients: at the start, in evaluation mode, in training mode
    try:
        runs.append(_backward(door, trained) if zero_maps else {})
        for name in zeros:  # what starts at zero (LoRA's B, gates) hides the gradients of what it is multiplied with
            trained[name].normal_(0, 0.02)
        runs.append(_backward(door, trained))
        silent = {name: ~runs[1][name].flatten(1).any(1) for name in matrices & inside.keys() & runs[1].keys()}
        silent = {name: still for name, still in silent.items() if bool(still.any())}
        for name, still in silent.items():  # an activation, or a softmax of large scores, may be flat where these lie
            trained[name][still] *= -1 / 16
        if silent:
            of_moved_rows = _backward(door, trained)
            runs[1] |= {name: runs[1][name] + of_moved_rows[name] for name in silent if name in of_moved_rows}
        model.train()
        try:
            runs.append(_backward(door, trained))
        except NotAskedError:
            runs.append({})
        except Exception:  # one sample behind a batch norm, targets that are asked for
            runs.append(runs[1])
    except RuntimeError as error:
        raise NotAskedError(f"no backward: {str(error).partition(chr(10))[0][:80]}") from None
    model.eval()
    moves = [{name for name, gradient in run.items() if bool(gradient.any())} for run in runs]
    lost = sorted(moves[1] - moves[2])
    if len(lost) > 0.5 * len(moves[1]):
        text = f"in training mode {len(lost)} of {len(trained)} parameters get no gradient, and in evaluation they do: "
        text += "checkpointing cuts the graph; write use_reentrant=False, or call enable_input_require_grads()"
        yield "wrong", text, lost[0].rpartition(".")[0]
        return
    if stuck := sorted(zero_maps & moves[1] - moves[0]):
        text = f"{len(stuck)} parameters are zero and get no gradient, as what they are multiplied with is zero too: "
        yield "wrong", f"{text}neither ever moves; start one of the two at random", stuck[0].rpartition(".")[0]
    moved = moves[1] | moves[2]
    counts = {each.heads for each in facts}
    inputs_of = {rows.name for each in facts for role in IN for rows in each.rows.get(role, ())}
    alive = {path for name, path in inside.items() if name in inputs_of & moved}  # others are detached as a whole
    options = _named_in_code(model)
    idle: dict[str, tuple[Verdict, str]] = {}
    for name, path in sorted(inside.items()):
        owner, short = name.rpartition(".")[0], name.removeprefix(f"{path}.").removesuffix(".weight")
        if name in moves[1]:
            # Of a table of positions that the attention itself holds, rows may go unread, too.
            is_own_table = owner == path and name not in maps and len(runs[1][name]) not in counts
            is_table = is_own_table or isinstance(model.get_submodule(owner), nn.Embedding)
            # What is no map of heads may need a longer batch: a compressor reads the block before by rows of its own.
            is_whole = name in maps or (path in read and (owner == path or is_table))
            part = _idle_part(runs[1][name], short, is_table, free.get(name, ())) if is_whole else ""
            idle |= {name: ("wrong", part)} if part else {}
        elif name in matrices:
            is_alive = path in alive if name in maps else name in runs[1]
            is_idle = is_alive and name not in moved and len(free.get(name, ())) < len(trained[name])
            if is_idle and name not in maps:  # what chooses, such as a router, has no gradient either
                output = door.ask()
                trained[name].normal_()
                is_idle = torch.equal(door.ask(), output)
            idle |= {name: ("wrong", short)} if is_idle else {}
        elif path in read and name not in zeros and not any(name in run for run in runs):
            idle |= {} if owner == path and short in options else {name: ("odd", short)}
    takers = door.record({}, among={name.rpartition(".")[0] for name in idle}) if idle else []
    # What is given zeros (queries of DETR's first layer) gets no gradient by that.
    blank = {door.names[module] for module, received, _ in takers if received and not any(map(torch.any, received))}
    # Where the maps of heads are known, another may be a gate whose features are added up.
    for name in (name for name in every if name in moves[1] and (name in maps or name.startswith(unread))):
        gradient = runs[1][name]
        moving = gradient[gradient.any(1)] if gradient.dim() == 2 else gradient[:0]
        if len(moving) > 1 and len(moving.unique(dim=0)) <= len(moving) // 2:
            text = f"rows of {name} get one gradient for two or more: they are added up before they are used"
            yield "wrong", f"{text}, as by an einsum that drops an index of heads: keep it", name.rpartition(".")[0]
    parts: dict[tuple[Verdict, str], dict[str, str]] = {}
    for name in (name for name in idle if name.rpartition(".")[0] not in blank):
        verdict, part = idle[name]
        parts.setdefault((verdict, re.sub(r"\d+", "*", inside[name])), {}).setdefault(part, inside[name])
    for (verdict, layers), places in parts.items():
        text = f"{', '.join(places)} of {layers or ROOT} get exactly no gradient: this part is not used; use it or "
        yield verdict, f"{text}drop it", next(iter(places.values()))


def _idle_part(gradient: Tensor, name: str, is_table: bool, free: Collection[int]) -> str:
    """Return which part of a parameter gets no gradient, in words; rows of tables may go unread, and free ones."""
    is_zero = gradient == 0
    if is_zero.dim() < 2:
        return ""
    is_zero[list(free)] = False
    rows = is_zero.flatten(1).all(1)
    if is_table and is_zero.dim() == 2 and len(rows) > 1 and int((~rows).sum()) == 1:
        return f"all but one of the {len(rows)} rows of {name}"
    if not is_table and is_zero.dim() == 2 and bool(rows.any()):
        return f"rows {shown_rows(rows.nonzero())} of {name}" if float(rows.float().mean()) > 1 / 64 else ""
    is_sliced = any(bool(is_zero.transpose(0, dim).flatten(1).all(1).any()) for dim in range(is_zero.dim()))
    share = float(is_zero.float().mean())
    return f"{share:.0%} of {name}" if 0.2 < share < 1 and not is_sliced else ""


def _named_in_code(model: nn.Module) -> set[str]:
    """Return the attributes that methods of modules may read, those that make them aside."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__} - {*nn.Module.__mro__}
    own = [item for kind in kinds for item in vars(kind).items()]
    methods = [value for name, value in own if isfunction(value) and "init" not in name and "reset" not in name]
    # What is decorated lies in a cell, which is empty while its name is not bound.
    every = walk_back(methods, lambda method: filter(isfunction, gc.get_referents(*(method.__closure__ or ()))))
    return set[str]().union(*(names_in(method.__code__) for method in every))


def _backward(door: Door, trained: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the gradients of a loss, or of outputs weighted at random; no hook of an optimizer's or of DDP's runs."""
    outputs: list[Any] = []
    torch.manual_seed(0)
    with torch.enable_grad(), ExitStack() as stack:
        stack.callback(door.outlet.register_forward_hook(lambda module, args, output: outputs.append(output)).remove)
        loss = next((t for t in tensors_in(door.forward()) if t.dim() == 0 and t.requires_grad), None)
        tensors = [t.float() for t in tensors_in(outputs[-1]) if t.requires_grad]
        if loss is None and not tensors:
            raise NotAskedError("outputs have no graph")
        if loss is None:
            seed = torch.Generator().manual_seed(0)
            loss = torch.stack([(t * torch.randn(t.shape, generator=seed).to(t)).sum() for t in tensors]).sum()
        nodes = walk_back(filter(None, [loss.grad_fn]), lambda node: [at for at, _ in node.next_functions if at])
        if any("CheckpointFunction" in node.name() for node in nodes):  # `grad` does not reach into it
            raise RuntimeError("reentrant checkpointing")
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(trained, gradients) if gradient is not None}


QUESTIONS: tuple[Question, ...] = (
    finite, same_twice, samples, later_tokens, source, token_before, order, padding, padding_cut_off,
    mask_of_nothing, packed, positions, registered, used, gradients,
)  # fmt: skip
