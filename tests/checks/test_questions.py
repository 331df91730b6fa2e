"""Questions tell what is broken whatever the code, accuse no right twin, cost little, and leave nothing behind."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from hdi_callback import HDIWarning, HeadDiversityMonitor, check
from hdi_callback.testing import assert_heads
from tests.checks.corpus import VOCABULARY, Attention, B, Full, MaskSeesNext, Model, T
from tests.checks.untried import REPORTS, Decoder
from tests.checks.untried_later import LATER

NOT_TOLD = {
    "sgl-project/SpecForge 414",  # positions of queries and keys that differ by more than one
    "fkodom/grouped-query-attention-pytorch 5",
    "rexrex9/nlp_torchtext 2",
    "kyegomez/FlashMHA 3",
    "huggingface/diffusers 13533",
    "Francis-Rings/StableAnimator 111",
    "strutive07/transformer-tensorflow2.0 14",
    "facebookresearch/detr 247",
    "PaddlePaddle/Parakeet 74",
    "JingyunLiang/SwinIR 153",
    "pytorch/pytorch 72580",
}
EVERY = (*REPORTS, *LATER)
TOKENS = torch.randint(VOCABULARY, (B + 1, T), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def forwards():
    """Which modules run, in a list that a check cannot reach, and so cannot put back."""
    modules = []
    handle = register_module_forward_pre_hook(lambda module, _: modules.append(module))
    yield modules
    handle.remove()


def checked(report, is_twin=False):
    model, inputs = report.build(is_twin), report.inputs()
    return check(model, lambda: model(**inputs))


@pytest.mark.parametrize("report", EVERY, ids=lambda report: report.source)
def test_what_a_report_describes_is_told_and_nothing_of_its_right_twin(report):
    assert bool(checked(report).findings) is (report.source not in NOT_TOLD)
    assert checked(report, is_twin=True).findings == ()


@pytest.mark.parametrize("report", EVERY, ids=lambda report: report.source)
def test_a_report_computes_something_else_than_its_twin(report):
    wrong, right = report.build(), report.build(is_twin=True)
    results = []
    for model in (wrong, right):
        with torch.no_grad():
            output = model(**report.inputs())
            torch.manual_seed(0)
            results.append((output, model.train()(**report.inputs()), len(list(model.parameters()))))
    assert bool(results[1][0].isfinite().all())
    # Dropout in the wrong place shows in training alone, and what is not registered in what trains.
    is_equal = [torch.allclose(first, second, atol=1e-5) for first, second in zip(results[0][:2], results[1][:2])]
    assert not all(is_equal) or results[0][2] != results[1][2]


@pytest.mark.parametrize(("reports", "rate"), [(REPORTS, (5, 14)), (LATER, (4, 14))])
def test_first_results_are_those_that_the_page_names(reports, rate):
    assert (sum(report.first for report in reports), len(reports)) == rate


def test_a_model_of_twelve_layers_is_checked_in_under_twenty_forwards(forwards):
    model = Model(*[Attention] * 12).eval()
    result = check(model, lambda: model(TOKENS))
    assert 5 < forwards.count(model) <= 1 + result.forwards < 20


def test_questions_leave_parameters_gradients_modes_and_random_states_as_they_were():
    model = Decoder(Attention).train()
    model.blocks[0]["attn"].drop.eval()
    nn.init.zeros_(model.blocks[0]["attn"].out_proj.weight)  # filled for a while
    model(TOKENS).sum().backward()
    before = [(value.clone(), value.grad.clone()) for value in model.parameters()]
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    assert check(model, lambda: model(TOKENS)).forwards
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    for value, (weight, grad) in zip(model.parameters(), before):
        assert torch.equal(value, weight)
        assert torch.equal(value.grad, grad)


def test_no_hook_of_an_optimizer_runs_in_a_backward_of_a_question(tmp_path):
    model = Decoder(Attention)
    for value in model.parameters():
        value.register_post_accumulate_grad_hook(lambda _: (tmp_path / "stepped").touch())
    assert "gradients" not in check(model, lambda: model(TOKENS)).not_asked
    assert not (tmp_path / "stepped").exists()
    model(TOKENS).sum().backward()
    assert (tmp_path / "stepped").exists()


def test_a_check_ends_with_how_many_layers_were_judged_and_what_was_not_asked():
    model = Decoder(Attention).eval()
    text = str(check(model, lambda: model(TOKENS)))
    assert "2 of 2 layers were judged." in text
    assert "Not asked: padding (no padding of tokens in this batch)." in text


def test_tokens_without_an_order_are_wrong():
    model = Decoder(Full, is_positioned=False).eval()
    (finding,) = check(model, lambda: model(TOKENS)).findings
    assert (finding.verdict, finding.name) == ("wrong", "order")


def test_adapters_of_which_both_matrices_are_zero_are_wrong_and_with_one_they_are_right():
    class Adapted(Attention):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(self.width, 4, bias=False), nn.Linear(4, self.width, bias=False)
            nn.init.zeros_(self.b.weight)
            self.q_proj.weight.requires_grad_(False)

        def project(self, x):
            _, k, v = super().project(x)
            return self.split(self.q_proj(x) + self.b(self.a(x)), self.heads), k, v

    model = Decoder(Adapted).eval()
    assert not [each for each in check(model, lambda: model(TOKENS)).findings if each.name == "gradients"]
    for block in model.blocks:
        nn.init.zeros_(block["attn"].a.weight)
    (finding,) = [each for each in check(model, lambda: model(TOKENS)).findings if each.name == "gradients"]
    assert "zero" in finding.text


def test_assert_heads_fails_of_an_answer():
    model = REPORTS[0].build()
    with pytest.raises(AssertionError, match="other samples"):
        assert_heads(model, lambda: model(**REPORTS[0].inputs()))


def test_nothing_that_trains_imports_or_asks_a_question(forwards):
    code = "import sys, hdi_callback, hdi_callback.monitor; print('hdi_callback.checks.questions' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
    model = Model(MaskSeesNext)
    with HeadDiversityMonitor(model), pytest.warns(HDIWarning, match="off by one"):
        model(TOKENS)
    assert forwards.count(model) == 1
