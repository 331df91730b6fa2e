"""The arguments of `Settings` as those of a callback: written once, known to editors, `inspect` and YAML.

A type checker reads the parameters from the types below; `inspect.signature`, and jsonargparse with it, from
``__signature__``; readers from a docstring in which all of them replace the line ``settings: ...``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, get_type_hints

from hdi_callback.arguments import did_you_mean
from hdi_callback.monitoring.session.settings import Settings

P = ParamSpec("P")
S = TypeVar("S", bound=Settings)
T = TypeVar("T")
R = TypeVar("R")
_PLACE = "settings: "


def method_of(settings: Callable[P, S]) -> Callable[[Callable[[T, S], R]], Callable[Concatenate[T, P], R]]:
    """Make a method that takes settings take their arguments instead.

    Args:
        settings: the class of the settings.

    Returns:
        A decorator.

    Example:
        >>> class Callback:
        ...     @method_of(Settings)
        ...     def __init__(self, settings):
        ...         self.every = settings.every_n_steps
        >>> Callback(every_n_steps=5).every, "metrics" in inspect.signature(Callback).parameters
        (5, True)
    """

    def decorate(method: Callable[[T, S], R]) -> Callable[Concatenate[T, P], R]:
        def called(self: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
            return method(self, _made(settings, method, args, kwargs))

        self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        named: Callable[Concatenate[T, P], R] = _named(called, method, [self, *_parameters(settings)])
        return named

    return decorate


def function_of(settings: Callable[P, S]) -> Callable[[Callable[[S], R]], Callable[P, R]]:
    """Make a function that takes settings take their arguments instead.

    Args:
        settings: the class of the settings.

    Returns:
        A decorator.
    """

    def decorate(function: Callable[[S], R]) -> Callable[P, R]:
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            return function(_made(settings, function, args, kwargs))

        named: Callable[P, R] = _named(called, function, _parameters(settings))
        return documented_by(settings)(named)

    return decorate


def documented_by(settings: Callable[..., Settings]) -> Callable[[T], T]:
    """Insert the documentation of the settings into a docstring, in place of its line ``settings: ...``.

    Args:
        settings: the class of the settings.

    Returns:
        A decorator of classes and functions.
    """

    def decorate(thing: T) -> T:
        if thing.__doc__ is not None:  # python -OO removes docstrings
            lines = thing.__doc__.split("\n")
            place = next(number for number, line in enumerate(lines) if line.lstrip().startswith(_PLACE))
            indent = lines[place][: -len(lines[place].lstrip())]
            lines[place : place + 1] = [indent + line for line in _documentation(settings)]
            thing.__doc__ = "\n".join(lines)
        return thing

    return decorate


def _made(settings: Callable[..., S], function: Callable[..., Any], args: Any, kwargs: Any) -> S:
    try:
        inspect.signature(settings).bind(*args, **kwargs)
    except TypeError as error:
        name = function.__qualname__.removesuffix(".__init__")
        parameters = inspect.signature(settings).parameters
        unknown = next((keyword for keyword in kwargs if keyword not in parameters), None)
        raise TypeError(f"{name}() {error}.{did_you_mean(unknown, parameters)} See help({name}).") from None
    return settings(*args, **kwargs)


def _named(called: Any, original: Callable[..., Any], parameters: list[inspect.Parameter]) -> Any:
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(called, name, getattr(original, name))
    returned = inspect.signature(original).return_annotation
    called.__signature__ = inspect.Signature(parameters, return_annotation=returned)
    called.__annotations__ = {
        parameter.name: parameter.annotation for parameter in parameters if parameter.name != "self"
    }
    return called


def _parameters(settings: Callable[..., Settings]) -> list[inspect.Parameter]:
    # Evaluated, as the classes of settings are in different modules.
    types = get_type_hints(settings)
    return [
        parameter.replace(annotation=types[parameter.name])
        for parameter in inspect.signature(settings).parameters.values()
    ]


def _documentation(settings: Any) -> list[str]:
    """The lines about arguments in the docstrings of a class and its bases, in the order of the fields."""
    found: dict[str, list[str]] = {}
    for base in reversed(settings.__mro__):
        name = None
        for line in inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2].split("\n"):
            if not line.startswith("    "):
                break
            if not line.startswith("     "):
                name = line.strip().partition(":")[0]
                found[name] = []
            if name is not None:
                found[name].append(line[4:])
    return [line for item in inspect.signature(settings).parameters for line in found[item]]
