"""Ask right models all questions, and count what is called wrong or odd: each is a false alarm until it is shown.

    python -m tests.studies.zoo.questions [--names bert gpt2 | --every 10] [--results runs/questions.jsonl]

Each architecture of transformers is asked with plain inputs, padded right, padded left, and with labels behind the
head of a language model, where it takes those. Results are JSON lines, and a run that was ended goes on.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.studies.zoo import configs, sources
from tests.studies.zoo.__main__ import run

PADS = 3


def cases(name: str) -> Iterator[tuple[str, nn.Module, Callable[[], object]]]:
    """Yield names of inputs, models and forwards: plain ones, and what can be made of their tokens."""
    model, forward = next(filter(runs, sources.examples(name)))
    plain = dict(forward.keywords) if isinstance(forward, partial) else {}
    if isinstance(plain.get("decoder_input_ids"), Tensor):  # else they are those of the source, as labels are
        plain["decoder_input_ids"] = plain["decoder_input_ids"].flip(-1)
        forward = partial(model, **plain)
    yield "plain", model, forward
    tokens, taken = plain.get("input_ids"), _arguments(model)
    if not isinstance(tokens, Tensor):
        return
    if "attention_mask" in taken and tokens.dim() == 2:
        for side in ("right", "left"):
            padded = _padded(model, tokens, left=side == "left")
            yield f"padded {side}", model, partial(model, **plain | padded)
    kind = _language_model(name)
    if kind is not None and "labels" in _arguments(kind):
        torch.manual_seed(0)
        config = copy.deepcopy(model.config)
        if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = 0
        language_model = configs.randomized(kind(config))
        rest = {key: value for key, value in plain.items() if key in {"input_ids", "use_cache"}}
        yield "labels", language_model, partial(language_model, **rest, labels=tokens)


def runs(example: sources.Example) -> bool:
    """Whether a forward runs."""
    try:
        with torch.no_grad():
            example[1]()
    except Exception:  # the next inputs may be what it takes
        return False
    return True


def _arguments(model: Any) -> set[str]:
    import inspect

    return set(inspect.signature(model.forward).parameters)


def _padded(model: nn.Module, tokens: Tensor, *, left: bool) -> dict[str, Tensor]:
    pad = getattr(model.config, "pad_token_id", None)
    where = slice(None, PADS) if left else slice(-PADS, None)
    mask, padded = torch.ones_like(tokens), tokens.clone()
    mask[0, where], padded[0, where] = 0, pad if isinstance(pad, int) and pad >= 0 else 0
    return {"input_ids": padded, "attention_mask": mask}


def _language_model(name: str) -> Any:
    import transformers
    from transformers.models.auto import modeling_auto

    for mapping in ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"):
        kind = getattr(modeling_auto, mapping).get(name)
        if isinstance(kind, str):
            return getattr(transformers, kind, None)
    return None


def examine(name: str) -> dict[str, Any]:
    """Return what `check` tells of an architecture with each of its inputs."""
    from hdi_callback import check

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {}
    begin = time.monotonic()
    try:
        for inputs, model, forward in cases(name):
            torch.manual_seed(0)
            if not runs((model, forward)):
                results[inputs] = {"error": "does not run"}
                continue
            start = time.monotonic()
            result = check(model, forward)
            results[inputs] = {
                "layers": result.layers, "judged": result.judged,
                "findings": [str(finding) for finding in result.findings], "not asked": dict(result.not_asked),
                "seconds": round(time.monotonic() - start, 1),
            }  # fmt: skip
    except Exception as error:
        results["error"] = f"{type(error).__name__}: {str(error)[:200]}"
    seconds = round(time.monotonic() - begin, 1)
    return {"name": name, "verdict": "asked" if "plain" in results else "did not run", "seconds": seconds} | results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="*", help="architectures; all by default")
    parser.add_argument("--every", type=int, default=1, help="a sample: one of so many")
    parser.add_argument("--results", type=Path, default=Path("runs/questions.jsonl"))
    options = parser.parse_args()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    known = {result["name"]: result for result in map(json.loads, lines)}
    names = options.names or sources.names("transformers")
    wanted = [name for start in range(options.every) for name in names[start :: options.every]]
    for common in ("bert", "clip"):  # what all of them import, before processes part
        next(configs.variants(common))
    with options.results.open("a") as file:
        for result in run([name for name in wanted if name not in known], 1, examine):
            known[result["name"]] = result
            file.write(json.dumps(result) + "\n")
            file.flush()
    asked = [case | {"of": f"{result['name']} {key}"} for result in known.values()
             for key, case in result.items() if isinstance(case, dict) and case.get("layers")]  # fmt: skip
    for verdict in ("WRONG", "ODD"):
        told = [f"{case['of']}: {text}" for case in asked for text in case["findings"] if text.startswith(verdict)]
        count = len({line.partition(" ")[0] for line in told})
        print(*told, f"{verdict}: {len(told)} findings on {count} architectures", sep="\n")
    print(f"{len({case['of'].partition(' ')[0] for case in asked})} architectures with attention, {len(asked)} checks")


if __name__ == "__main__":
    main()
