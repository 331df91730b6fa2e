"""One architecture: build it, run it, and compare what is claimed of every attention layer with what it really does."""

from __future__ import annotations

import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn

from hdi_callback.attention import AttentionLayer, survey
from tests.attention.sweep import architectures, inputs, packages, vision
from tests.attention.sweep.changes import each_head_changes_alone
from tests.attention.sweep.documented import is_documented
from tests.attention.sweep.judge import Claim, Finding, claim_of, heads_of, is_over_features, judge, merged
from tests.attention.witness import Witness, witness

BATCH = 41  # a prime, so that no other size is taken for it; more than twice the widest head
_FEW = 3
_PRIMES = (41, 53, 67, 83, 107, 151, 193, 293, 373, 577, 733)
_ATTENTION = re.compile(r"(?i)attention|attn")


def examine(model_type: str) -> dict[str, Any]:
    """Examine an architecture of transformers, or a model of timm by its name with a prefix."""
    torch.manual_seed(0)  # the same weights whenever and wherever it is examined
    if model_type.startswith(vision.PREFIX):
        return _examine_vision(model_type)
    if model_type.startswith(packages.PREFIX):
        return _examine_package(model_type)
    report: dict[str, Any] = {}
    start = time.monotonic()
    variants = architectures.variants(model_type)
    for _ in range(4):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = next(variants, None)
        except architectures.NoModelError as error:
            return {"verdict": "no model", "reason": str(error)}
        except Exception as error:
            return report or {"verdict": "does not build", "reason": _first_line(error)}
        if model is None:
            break
        again = examine_model(model) | {"class": type(model).__name__}
        if not report or _WORTH.get(again["verdict"], 0) > _WORTH.get(report["verdict"], 0):
            report = again
        # A model that is built may not run, for it is too small: then a larger one.
        if _WORTH.get(report["verdict"], 0) or time.monotonic() - start > _PATIENCE:
            break
    return report


def _examine_vision(name: str) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, run = vision.build(name)
    except Exception as error:
        return {"verdict": "does not build", "reason": _first_line(error)}
    kind = {"class": type(model).__name__}
    if not vision.has_attention(model):
        return {"verdict": "not attention", "reason": ""} | kind
    return examine_model(model, BATCH, run) | kind


def _examine_package(name: str) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, run = packages.build(name)
            with torch.no_grad():
                run(model, _FEW)
    except Exception as error:
        return {"verdict": "does not build", "reason": _first_line(error)}
    report = examine_model(model, BATCH, run) | {"class": type(model.part).__name__}
    if report["verdict"] == "not attention" and packages.EXAMPLES[name.removeprefix(packages.PREFIX)].attends:
        if report["said"]:
            reasons = "; ".join(f"{kind}: {reason}" for kind, reason in dict(report["said"].values()).items())
            return report | {"verdict": "refused", "reason": reasons}
        # A softmax written in another way than the witness can follow; nothing was said of it all the same.
        report |= {"verdict": "missed", "reason": f"{report['class']}: nothing is said of it"}
    return report


# another model is tried after a verdict of no worth
_PATIENCE = 20.0  # seconds
_WORTH = {"right": 3, "refused": 3, "not judged": 1, "wrong": 4, "missed": 4, "one head": 2, "not attention": 1}


def examine_model(model: nn.Module, batch: int = BATCH, *runs: Any) -> dict[str, Any]:
    """Examine a model; `runs` are functions that run it, otherwise its inputs are guessed.

    Where a layer is refused, once more with what ran it, as a user would.
    """
    report, forwards = _examined(model, batch, runs)
    forwards = forwards or [partial(run, model, _FEW) for run in runs]
    is_silent = bool(runs) and report["verdict"] == "not attention" and bool(report["said"])
    if not forwards or not (is_silent or report["verdict"] == "refused"):
        return report
    again, _ = _examined(model, batch, runs, partial(_one_after_another, forwards))
    if _left_out(again) < _left_out(report):
        return again | {"forward": True}
    # What was run says more truly why a layer is refused; and what is wrong with it counts.
    return again if _left_out(again) == _left_out(report) else report


def _left_out(report: dict[str, Any]) -> int:
    return len(report["refused"] | report["unseen_refused"])


def _one_after_another(forwards: Sequence[Callable[[], Any]]) -> None:
    """Some models run through their attention, and then fail for what the small config lacks."""
    for forward in forwards:
        with suppress(Exception), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            forward()


def _examined(
    model: nn.Module, batch: int, runs: Sequence[Any], forward: Callable[[], Any] | None = None
) -> tuple[dict[str, Any], list[Callable[[], Any]]]:
    """Examine a model once, and give what runs its attention: with a few sequences, what was seen to run it first."""
    found = survey(model, forward=forward)
    names = {module: name for name, module in model.named_modules()}
    claims: dict[nn.Module, list[AttentionLayer]] = {}
    for layer in found.layers:
        claims.setdefault(layer.module, []).append(layer)
    parts = dict(model.named_modules())
    refusals = {parts[refusal.name]: refusal for refusal in found.refused}
    called: set[nn.Module] = set()
    widest = max([layer.head_dim for layer in found.layers] + [layer.value_dim for layer in found.layers] + [8])
    wanted = [2.2 * widest + 8]
    # That a query or a value is a map of no token is seen with more sequences than features.
    wanted += [
        layer.slices["key"].in_features + 9 for layer in found.layers if not {"query", "value"} <= set(layer.slices)
    ]
    # So is a filter over time that comes between a projection and attention.
    filtered = [layer for layer in found.layers if any(one.dim() == 3 for one in layer.module.parameters())]
    wanted += [5 * layer.head_dim + 20 for layer in filtered]
    batch = next(prime for prime in _PRIMES if prime >= max(batch, min(max(wanted), _PRIMES[-1])))
    report: dict[str, Any] = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "claimed": len(claims),
        "refused": {},
        "layers": {},
        "missed": {},
        "single": [],
        "one_head": [],
        "over_features": [],
        "errors": [],
        "ways": [],
    }
    errors: list[str] = []
    forwards: list[Callable[[], Any]] = []
    for way, observed, few in _runs(model, claims, refusals, batch, errors, runs, called):
        report["ways"].append(way)
        forwards.append(few)
        _take(report, observed, names, claims, refusals, batch, few)
    report["errors"] = list(dict.fromkeys(errors))[-3:]
    # Of a single head there is nothing to compare.
    unseen = [layer for layer in found.layers if layer.name not in report["layers"] and layer.num_heads > 1]
    report["unseen"] = {layer.name: type(layer.module).__name__ for layer in unseen}
    # What ran and computed no attention is none, though it was refused as if it were: linear attention, state spaces.
    # So is a single head.
    # So is attention over features: it has no keys of tokens.
    rest = [r for r in found.refused if r.name not in report["refused"] and r.name not in report["one_head"]]
    report["said"] = {r.name: [r.module_type, r.reason] for r in rest}
    over_features = {type(parts[name]).__name__ for name in report["over_features"]}
    report["no_attention"] = sorted({r.module_type for r in rest if parts[r.name] in called} | over_features)
    # One that has not run is as its twin that has.
    known = {_shapes(parts[name]) for name in report["one_head"]}
    known |= {_shapes(parts[r.name]) for r in rest if parts[r.name] in called}
    known -= {_shapes(parts[name]) for name in report["refused"]}
    rest = [r for r in rest if parts[r.name] not in called and _shapes(parts[r.name]) not in known]
    report["unseen_refused"] = {r.name: [r.module_type, r.reason] for r in rest}
    report["verdict"], report["reason"] = _verdict(report)
    if not runs:
        forwards += _tries(model, [parts[name] for name in report["unseen_refused"]])
    return report, forwards


_Inputs = Callable[[int], Iterator[Any]]  # keyword arguments for so many sequences


def _shapes(module: nn.Module) -> tuple[Any, ...]:
    return type(module), tuple((name, parameter.shape) for name, parameter in module.named_parameters())


def _compared(model: nn.Module, claims: Mapping[nn.Module, Any]) -> set[nn.Module]:
    """Collect what claims are compared with: what is in a layer, beside it, and around it. The rest would be large."""
    kept = {part for module in claims for part in module.modules()}
    layers = [layer for of_module in claims.values() for layer in of_module]
    kept |= {layer.output_projection for layer in layers if layer.output_projection is not None}
    outputs = [layer.slices["output"] for layer in layers if "output" in layer.slices]
    kept |= {one.module.get_submodule(one.parameter.rpartition(".")[0]) for one in outputs}
    for module in model.modules():
        if any(child in claims for child in module.children()):
            kept |= {module, *module.children()}
    return kept


def _one(module: nn.Module, made: _Inputs, count: int) -> Any:
    """Run a module on a few sequences, made as those that ran it were."""
    return module(**next(islice(made(_FEW), count, None)))


def _tries(model: nn.Module, modules: Sequence[nn.Module]) -> list[Callable[[], Any]]:
    """Run what has not been seen to run, for the module that is looked for may be reached all the same."""
    if not modules:
        return []
    wholes = [part for part in model.modules() if part is model or _is_whole(part)]
    wholes = [part for part in wholes if any(module in set(part.modules()) for module in modules)]
    tries = [partial(_one, part, partial(inputs.for_model, part), count) for part in wholes[:4] for count in range(12)]
    few = list({type(module): module for module in modules}.values())[:4]
    return tries + [
        partial(_one, module, _alone(module), count) for module in few for count in range(12)
    ]  # fmt: skip


def _alone(module: nn.Module, layer: Any = None) -> _Inputs:
    slices = layer.slices if layer else {}
    width, head_dim = (slices.get("query", slices["key"]).in_features, layer.head_dim) if layer else (None, None)
    return lambda batch: inputs.for_attention(module, batch, width, head_dim)


def _is_whole(part: nn.Module) -> bool:
    from transformers import PreTrainedModel

    return isinstance(part, PreTrainedModel) or is_documented(part)


def _runs(model, claims, refusals, batch, errors, runs, called) -> Iterator[tuple[str, Witness, Callable[[], Any]]]:
    """Run the model, then those of its parts with attention that has not run, then attention by itself.

    Each comes with what runs the same with a few sequences.
    """
    ran: set[nn.Module] = set()
    shake = dict.fromkeys(claims, 0.5)
    keep = _compared(model, claims) | {part for module in refusals for part in module.modules()}

    def attempt(module: nn.Module, calls: Iterator[Any], most: int) -> tuple[Witness, int] | None:
        best: tuple[Witness, int] | None = None  # one that ends with an exception is kept if none does better
        for count, call in enumerate(calls):
            if count >= most:
                break
            is_whole = False
            try:
                with torch.no_grad(), warnings.catch_warnings(), witness(module, shake=shake, keep=keep) as observed:
                    warnings.simplefilter("ignore")
                    torch.manual_seed(5)
                    call()
                    is_whole = True
            except Exception as error:
                errors.append(f"{type(module).__name__}: {_first_line(error)}")
            called.update(one.module for one in observed.calls if one.is_done)
            if len(observed.computations) > (len(best[0].computations) if best is not None else 0):
                best = observed, count
            if is_whole and observed.computations:
                break
        if best is not None:
            ran.update(one.module for computation in best[0].computations for one in computation.calls)
        return best

    def owners(root: nn.Module) -> list[nn.Module]:
        """Attention that has not run: claimed, refused, or so called with nothing so called in it."""
        listed = [m for m in root.modules() if m in claims or m in refusals]
        covered = {part for module in listed for part in module.modules()}
        for module in root.modules():
            if _ATTENTION.search(type(module).__name__) and module not in covered:
                inner = [part for part in module.modules() if part is not module]
                is_innermost = not any(part in covered or _ATTENTION.search(type(part).__name__) for part in inner)
                if is_innermost and sum(parameter.dim() >= 2 for parameter in module.parameters()) >= 2:
                    listed.append(module)
        done = ran | (called & set(refusals))
        return [module for module in listed if not any(part in done for part in module.modules())]

    def tried(way: str, module: nn.Module, made: _Inputs, most: int) -> Iterator[tuple[str, Witness, Any]]:
        found = attempt(module, (_call(module, kwargs) for kwargs in made(batch)), most)
        if found is not None:
            yield way, found[0], partial(_one, module, made, found[1])

    if runs:
        for run in runs:
            found = attempt(model, iter([partial(run, model, batch)]), 1)
            if found is not None:
                yield "forward", found[0], partial(run, model, _FEW)
        return
    yield from tried("forward", model, partial(inputs.for_model, model), 40)
    if not owners(model):
        return
    for part in model.modules():
        if part is not model and _is_whole(part) and part not in ran and owners(part):
            yield from tried("part", part, partial(inputs.for_model, part), 30)
    kinds: Counter[str] = Counter()
    for module in owners(model):
        kinds[type(module).__name__] += 1
        if kinds[type(module).__name__] <= 3:
            yield from tried("alone", module, _alone(module, *claims.get(module, ())[:1]), 60)


def _call(module: nn.Module, kwargs: dict[str, Any]) -> Any:
    return lambda: module(**kwargs)


def _by_changes(finding: Finding, claim: Claim, few: Callable[[], Any]) -> Finding:
    """Ask which heads change, where filters over many tokens lie between a projection and attention."""
    with suppress(Exception):
        if each_head_changes_alone(claim, few, _FEW):
            remarks = ("compared by changing one head at a time",)
            remarks += ("output not compared",) if "output" in claim.roles else ()
            return replace(finding, is_right=True, reason="", remarks=remarks)
    return finding


def _take(report, observed, names, claims, refusals, batch, few) -> None:
    """Write down what one run showed; `few` runs the same with few sequences."""
    for computation in merged(observed.computations, batch):
        modules = [call.module for call in computation.calls]
        owner = next((module for module in reversed(modules) if module in claims), None)
        if owner is None and modules:  # its forward may be called without a call of the module itself
            around = [module for module in claims if modules[-1] in set(module.modules())]
            owner = min(around, key=lambda module: sum(1 for _ in module.modules()), default=None)
        if owner is not None:
            if heads_of(computation, batch, inputs.LENGTH) == 1 == max(one.num_heads for one in claims[owner]):
                report["single"].append(type(owner).__name__)  # there is nothing to compare
                continue
            # Of several attentions in one module, each is explained by one of its layers.
            judged = [(one, judge(claim_of(one), observed, computation, batch)) for one in claims[owner]]
            layer, finding = min(judged, key=lambda one: _RANK[one[1].is_right])
            if finding.is_right is False and "several tokens" in layer.kind and finding.heads == layer.num_heads:
                finding = _by_changes(finding, claim_of(layer), few)
            if finding.is_right is False and layer.left_out:  # which is said where it is found
                part = [type(owner).__name__, f"it is read in part: without {layer.left_out}", finding.heads]
                report["refused"][layer.name] = part
                continue
            facts = {
                "class": type(owner).__name__,
                "kind": layer.kind,
                "right": finding.is_right,
                "reason": finding.reason,
                "heads": [finding.heads, finding.key_heads, finding.key_width, finding.value_width],
                "claim": [layer.num_heads, layer.num_key_heads, layer.head_dim, layer.value_dim],
                "remarks": [*finding.remarks, *([f"read without {layer.left_out}"] if layer.left_out else [])],
            }
            before = report["layers"].get(layer.name)
            if before is None or _rank(facts) > _rank(before):
                report["layers"][layer.name] = facts
            continue
        refused = next((module for module in reversed(modules) if module in refusals), None)
        heads = heads_of(computation, batch, inputs.LENGTH)
        where = modules[-1] if modules else None
        name = names.get(where, "?")
        if heads != 1 and is_over_features(computation, observed, batch):
            report["over_features"] = sorted({*report["over_features"], name if refused is None else names[refused]})
            continue
        if heads == 1:
            report["single"].append(type(where if refused is None else refused).__name__)
            if refused is not None:
                report["one_head"] = sorted({*report["one_head"], refusals[refused].name})
        elif refused is not None:
            refusal = refusals[refused]
            report["refused"][refusal.name] = [refusal.module_type, refusal.reason, heads]
        else:
            report["missed"][name] = [type(where).__name__, str(list(computation.query.shape)), heads]


_RANK = {False: 2, None: 1, True: 0}


def _rank(facts: dict[str, Any]) -> int:
    """The worst of the computations of a layer is its verdict."""
    return _RANK[facts["right"]]


def _verdict(report: dict[str, Any]) -> tuple[str, str]:
    layers = report["layers"]
    wrong = {facts["class"]: facts["reason"] for facts in layers.values() if facts["right"] is False}
    if wrong:
        return "wrong", "; ".join(f"{kind}: {reason}" for kind, reason in wrong.items())
    if report["missed"]:
        return "missed", "; ".join(sorted({f"{kind} {shape}" for kind, shape, _ in report["missed"].values()}))
    refused = {kind: reason for kind, reason, *_ in (report["refused"] | report["unseen_refused"]).values()}
    if refused:
        return "refused", "; ".join(f"{kind}: {reason}" for kind, reason in refused.items())
    unjudged = {facts["class"]: facts["reason"] for facts in layers.values() if facts["right"] is None}
    if unjudged:
        return "not judged", "; ".join(f"{kind}: {reason}" for kind, reason in unjudged.items())
    strange = set(report["unseen"].values()) - {facts["class"] for facts in layers.values()}
    if layers and strange:
        return "not judged", "; ".join(f"{kind}: it did not run" for kind in sorted(strange))
    if layers:
        return "right", ""
    if report["unseen"]:
        return "does not run", "; ".join(report["errors"][-1:])
    if report["single"]:
        return "one head", ", ".join(sorted(set(report["single"])))
    if not report["ways"]:
        return "not attention", "no attention in it was found or ran"
    return "not attention", ""


def _first_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
