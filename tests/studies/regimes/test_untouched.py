"""Twenty-four trainings are bit-identical with and without a monitor.

Losses, weights, states of optimizers, random states, calls of the user's hooks, operations that the user's modes see.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.studies.regimes.ranks import on_two_ranks
from tests.studies.regimes.states import STATES
from tests.studies.regimes.trainings import Regime, compared, differences, train
from tests.versions import HAS_FSDP2_ON_CPU, Outcomes

REGIMES = {
    "lightning": Regime("lightning"),
    "transformers": Regime("transformers"),
    "loop": Regime("loop"),
    "lightning, bf16, accumulation, clipping": Regime("lightning", precision="bf16", accumulate=2, clips=True),
    "transformers, bf16, accumulation of unequal batches, clipping": Regime(
        "transformers", precision="bf16", accumulate=2, is_unequal=True, clips=True
    ),
    "loop, bf16, accumulation of unequal batches, clipping": Regime(
        "loop", precision="bf16", accumulate=2, is_unequal=True, clips=True
    ),
    "loop, reentrant checkpointing": Regime("loop", checkpointing="reentrant"),
    "lightning, checkpointing, bf16": Regime("lightning", checkpointing="other", precision="bf16"),
    "loop, compiled": Regime("loop", compiler="aot_eager"),
    "lightning, compiled, bf16": Regime("lightning", compiler="aot_eager", precision="bf16"),
    "loop, compiled by inductor": Regime("loop", compiler="inductor"),
    "loop, LoRA": Regime("loop", model="lora"),
    "loop, torch's attention, hooks that count": Regime("loop", model="torch", counts=True),
    "lightning, hooks that count, checkpointing": Regime("lightning", counts=True, checkpointing="other"),
    "loop, fast path in validation": Regime("loop", model="encoder", validates=True),
    "transformers, fast path in validation": Regime("transformers", model="encoder", validates=True),
    "lightning, two optimizers, validation": Regime("lightning", optimizers=2, validates=True),
    "loop, mode around the step": Regime("loop", has_mode=True, every=1),
    "lightning, mode around the step": Regime("lightning", has_mode=True, every=1),
    "loop, warnings are errors, NaN, a refused layer, checkpointing": Regime(
        "loop", is_broken=True, checkpointing="reentrant"
    ),
}
SLOW = {"lightning, compiled, bf16", "loop, compiled by inductor"}
RANKS = {how: Regime(parallel=how) for how in ("ddp", "fsdp2", "tp")}


@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.slow if one in SLOW else ()) for one in REGIMES])
def test_a_training_is_bit_identical_with_and_without_a_monitor(name: str, tmp_path: Path) -> None:
    regime = REGIMES[name]
    pytest.importorskip("peft" if regime.model == "lora" else regime.trainer if regime.trainer != "loop" else "torch")
    assert not differences(regime, tmp_path)


@pytest.mark.parametrize("compiler", ["", pytest.param("aot_eager", marks=pytest.mark.slow)], ids=["eager", "compiled"])
@pytest.mark.parametrize("state", STATES)
def test_a_training_whose_forward_has_a_state_of_its_own_is_bit_identical(
    state: str, compiler: str, tmp_path: Path
) -> None:
    regime = Regime("loop", state=state, compiler=compiler, every=2)
    try:
        alone = train(regime, tmp_path / "alone", is_watched=False)
    except AssertionError as error:
        pytest.skip(f"torch {torch.__version__} cannot compile it, without a monitor either: {str(error)[:60]}")
    assert not compared(regime, alone, train(regime, tmp_path / "watched", is_watched=True))


@pytest.mark.slow
def test_what_is_imported_for_a_reading_draws_no_random_number(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.studies.regimes.trainings import Regime, differences\n"
        "assert 'rich' not in sys.modules\n"
        "sys.exit(str(differences(Regime('loop'), Path(sys.argv[1]))))"
    )
    fresh = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, capture_output=True, text=True)
    assert fresh.stderr.splitlines()[-1:] == ["[]"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[Any, Any]]]:
    regimes = {how: regime for how, regime in RANKS.items() if how != "fsdp2" or HAS_FSDP2_ON_CPU}
    found = on_two_ranks(list(regimes.values()), tmp_path_factory.mktemp("ranks"))
    return Outcomes({how: [rank[place] for rank in found] for place, how in enumerate(regimes)})


@pytest.mark.ranks
@pytest.mark.parametrize("how", RANKS)
def test_a_training_on_two_ranks_is_bit_identical_with_and_without_a_monitor(how: str, ranks: Any) -> None:
    assert ["records" in watched for _, watched in ranks[how]] == [True, False], "the first rank writes"
    for alone, watched in ranks[how]:
        assert not compared(RANKS[how], alone, watched)
