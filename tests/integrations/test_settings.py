"""The arguments that all callbacks share: written once, frozen, and known to editors wherever they are written."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, fields
from typing import get_type_hints

import pytest

from hdi_callback import HDICallback, HDIHandler, HDITrainerCallback, watch_heads
from hdi_callback.monitoring.session.settings import Settings

SHELLS = (HDICallback, HDITrainerCallback, HDIHandler, watch_heads)


def test_settings_do_not_change_once_they_are_checked():
    settings = Settings(every_n_steps=5)
    with pytest.raises(FrozenInstanceError):
        settings.every_n_steps = 1


@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell.__name__)
def test_every_argument_of_the_settings_is_one_of_each_callback_with_its_type_and_default(shell):
    called = shell.__init__ if inspect.isclass(shell) else shell
    parameters, expected = inspect.signature(called).parameters, get_type_hints(Settings)
    shared = [one for one in fields(Settings) if one.init]
    assert len(shared) > 10
    for one in shared:
        assert parameters[one.name].annotation == expected[one.name], one.name
        assert parameters[one.name].default == one.default, one.name
        assert f"{one.name}:" in shell.__doc__, one.name
