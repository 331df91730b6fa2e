"""The claims of Fokoué 2026 (arXiv 2605.20271), each as a program that measures it and gives a verdict.

    python -m examples.theory                      all of them; finished claims are not run again
    python -m examples.theory sparse_kernels       one of them
    python -m examples.theory --size small         smaller samples, in seconds

Each module has `run(size) -> Claim`. The rule of a verdict is written in the module, above the numbers, and is a
function of the numbers alone.
"""

from __future__ import annotations

CLAIMS = (
    "softmax_is_nadaraya_watson",
    "sparse_kernels",
    "error_decompositions",
    "weighted_ensembles",
    "error_falls_with_diversity",
    "floor_of_shared_tokens",
    "collapses",
    "merging_key_heads",
    "rank_and_identifiability",
    "synergistic_graphs",
    "neighbours",
)

PAGES_ALONE = {
    "best_allocation": "The best number of heads, from measured constants",
    "scaling_law": "The best head width grows with log n, in one regime",
    "specialisation": "Do heads specialise in training?",
}
"""Pages whose programs are no longer kept: name -> title."""
