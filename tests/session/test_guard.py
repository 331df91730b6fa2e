"""Nothing of this package ends a training: neither its failures nor its warnings."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hdi_callback.errors import MisconfigurationError, MonitoringWarning
from hdi_callback.guard import Guard, describe, guarded, warn, without_modes


class Owner:
    def __init__(self) -> None:
        self._guard = Guard()

    @guarded("dividing", passes=(MisconfigurationError,))
    def divide(self, number: float) -> float:
        if number < 0:
            raise MisconfigurationError("write a number of at least 0")
        return 1 / number

    @guarded("waiting")
    def wait(self) -> None:
        raise KeyboardInterrupt


def test_a_failure_costs_one_warning_for_each_kind_of_work() -> None:
    owner = Owner()
    with pytest.warns(MonitoringWarning, match=r"Dividing failed \(ZeroDivisionError: .*\)\. Training goes on\."):
        assert owner.divide(0) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert owner.divide(0) is None
    assert owner._guard.count == {"dividing": 2}
    assert owner.divide(4) == 0.25


def test_misuse_and_interruptions_pass() -> None:
    with pytest.raises(MisconfigurationError):
        Owner().divide(-1)
    with pytest.raises(KeyboardInterrupt):
        Owner().wait()


def test_a_warning_does_not_raise_where_warnings_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn("The weights are not finite. Training goes on.")
    assert "MonitoringWarning: The weights are not finite. Training goes on." in capsys.readouterr().err


def test_a_warning_does_not_raise_where_somebody_shows_warnings_in_a_way_that_raises(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def show(*args: object, **kwargs: object) -> None:
        raise OSError("the log is closed")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", show)
        warn("A message.")
    assert "A message." in capsys.readouterr().err


def test_a_warning_has_no_source_line() -> None:
    code = "from hdi_callback.guard import warn\nwarn('A message.')"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    assert printed == "<hdi_callback>:1: MonitoringWarning: A message.\n"


def test_warnings_can_be_ignored_as_others() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("ignore", category=MonitoringWarning)
        warn("A message.")
    assert not caught


def test_an_exception_whose_text_raises_is_described_by_its_type() -> None:
    class OddError(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert describe(OddError()) == "OddError"
    owner = Owner()
    with pytest.warns(MonitoringWarning, match="OddError"):
        owner._guard.failed("reading", OddError())


def test_the_users_modes_see_nothing_of_what_is_guarded() -> None:
    seen: list[str] = []

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    weight = torch.ones(2, 2, requires_grad=True)
    with Dispatch(), Function(), torch.autocast("cpu", dtype=torch.bfloat16):
        with without_modes():
            product = weight @ weight
        assert not seen
        assert product.dtype == torch.float32
        assert not product.requires_grad
        assert (weight @ weight).dtype == torch.bfloat16
        assert seen, "the modes are on again"


def test_modes_are_put_back_after_a_failure() -> None:
    class Function(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    with torch.device("meta"), Function():
        before = torch.overrides._get_current_function_mode_stack()
        with pytest.raises(ZeroDivisionError), without_modes():
            assert torch.zeros(1).device.type == "cpu"
            _ = 1 / 0
        assert torch.overrides._get_current_function_mode_stack() == before
        assert torch.zeros(1).device.type == "meta"


def test_a_guarded_method_does_not_break_a_compiled_graph() -> None:
    torch._dynamo.reset()
    owner = Owner()

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return x * owner.divide(2.0)

    assert compiled(torch.ones(1)).item() == 0.5
