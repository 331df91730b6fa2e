"""Measure the memory that an audit of a large checkpoint needs, and write docs/benchmarks/audit.md.

    python -m tests.benchmarks.bench_audit --layers 16 --output docs/benchmarks/audit.md

Writes a folder of shards of the shape of a Llama of 7 billion parameters (with fewer layers, as the disk allows) with
random weights in bfloat16, audits it in a process of its own, and compares its peak of resident memory with what the
libraries take and with the size of the model and of its largest layer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.benchmarks.ratios import write

WIDTH, HIDDEN, HEADS, WORDS = 4096, 11008, 32, 32000

_CHILD = """
import json, sys, time
import torch, transformers
from transformers import LlamaForCausalLM
from hdi_callback import audit
def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
torch.set_num_threads(1)
libraries, start = peak(), time.perf_counter()
found = audit(sys.argv[1])
print(json.dumps({
    "libraries": libraries, "peak": peak(), "seconds": time.perf_counter() - start, "verdict": found.verdict,
    "layers": len(found.layers), "not_audited": len(found.not_audited),
}))
"""


def write_folder(folder: Path, layers: int) -> tuple[int, int, int]:
    """Write the shards; gives the bytes of the model, of its largest layer, and of the attention in it."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        num_hidden_layers=layers, vocab_size=WORDS, architectures=["LlamaForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(folder)
    noise = torch.randn(2**20).bfloat16()

    def filled(*shape: int) -> torch.Tensor:  # what is not audited need not be independent
        return noise.repeat(-(-shape[0] * shape[-1] // len(noise)))[: shape[0] * shape[-1]].reshape(shape).contiguous()

    places: dict[str, str] = {}

    def save(number: int, tensors: dict[str, torch.Tensor]) -> int:
        name = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(tensors, name))
        return sum(one.numel() * one.itemsize for one in tensors.values())

    total = save(0, {"model.embed_tokens.weight": filled(WORDS, WIDTH), "lm_head.weight": filled(WORDS, WIDTH)})
    norm = {"model.norm.weight": torch.ones(WIDTH, dtype=torch.bfloat16)}
    largest = 0
    for layer in range(layers):
        of = f"model.layers.{layer}."
        heads = {f"{of}self_attn.{role}_proj.weight": 0.02 * torch.randn(WIDTH, WIDTH).bfloat16() for role in "qkvo"}
        others = {
            f"{of}mlp.gate_proj.weight": filled(HIDDEN, WIDTH),
            f"{of}mlp.up_proj.weight": filled(HIDDEN, WIDTH),
            f"{of}mlp.down_proj.weight": filled(WIDTH, HIDDEN),
            f"{of}input_layernorm.weight": torch.ones(WIDTH, dtype=torch.bfloat16),
            f"{of}post_attention_layernorm.weight": torch.ones(WIDTH, dtype=torch.bfloat16),
        }
        if layer == layers // 2:  # one head twice, for the audit to find
            keys = heads[f"{of}self_attn.k_proj.weight"].unflatten(0, (HEADS, -1))
            keys[21] = keys[3] + 0.001 * torch.randn_like(keys[3])
        size = save(layer + 1, {**heads, **others, **(norm if layer == 0 else {})})
        largest, total = max(largest, size), total + size
        print(f"shard {layer + 1} of {layers}", file=sys.stderr)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total, largest, 4 * WIDTH * WIDTH * 2


def measured(folder: Path) -> dict[str, object]:
    done = subprocess.run([sys.executable, "-c", _CHILD, str(folder)], capture_output=True, text=True, check=True)
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def page(layers: int, sizes: tuple[int, int, int], found: dict) -> str:
    total, largest, attention = sizes

    def mb(size: float) -> str:
        return f"{size / 1e6:,.0f} MB"

    added = found["peak"] - found["libraries"]
    of = f"{added / largest:.2f} of the largest layer, {added / total:.1%} of the model"
    return f"""# Memory of an audit

`python -m tests.benchmarks.bench_audit --layers {layers} --output docs/benchmarks/audit.md`, torch {torch.__version__},
one thread. A folder of {layers + 1} shards, {layers} layers of the shape of a Llama of 7 billion parameters with random
weights in bfloat16.

| what | size |
|---|---|
| the model on the disk | {mb(total)} |
| its largest layer | {mb(largest)} |
| the attention of a layer | {mb(attention)} |
| the libraries alone (torch, transformers, lightning), peak | {mb(found["libraries"])} |
| the audit, peak of resident memory | {mb(found["peak"])} |
| of it beyond the libraries | {mb(added)}: {of} |

The audit took {found["seconds"]:.0f} s. Its verdict: "{found["verdict"]}"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--folder", type=Path, help="where to write the shards; a temporary folder by default")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        start = time.perf_counter()
        sizes = write_folder(Path(name), arguments.layers)
        print(f"written in {time.perf_counter() - start:.0f} s", file=sys.stderr)
        text = page(arguments.layers, sizes, measured(Path(name)))
    write(text.splitlines(), arguments.output)


if __name__ == "__main__":
    main()
