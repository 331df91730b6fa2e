"""`guarded`: a function that training calls does not raise into it.

Everything by which training reaches this package is decorated: the methods that trainers and loops call, and the hooks
on modules, tensors and optimizers. Where code of the user's runs inside a function of the package, the function itself
is not decorated, so that what that code raises passes, but what it calls of ours before and after is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from hdi_callback.errors import HDIWarning, NothingToWatchError

F = TypeVar("F", bound=Callable[..., Any])


def guarded(
    work: str, *, otherwise: Callable[[Any], Any] | None = None, passes: tuple[type[Exception], ...] = ()
) -> Callable[[F], F]:
    """Let a method pass its exceptions to the ``_failed(work, error)`` of its object, and not to its caller.

    Warnings of this package that the user has made errors pass, and so does the error that `strict` asks for. While a
    graph is compiled the method is called as it is.

    Args:
        work: what it does, for the warning: ``"watching a step"``.
        otherwise: takes the object to what is returned where the method raised, after what must still be done; guarded
            as well; `None` by default.
        passes: exceptions that the caller shall see, such as those of misuse before training starts.

    Returns:
        A decorator of methods.

    Example:
        >>> class Hook:
        ...     def _failed(self, work, error):
        ...         print(f"{work} failed: {error}")
        ...
        ...     @guarded("dividing")
        ...     def divide(self, number):
        ...         return 1 / number
        >>> Hook().divide(4)
        0.25
        >>> Hook().divide(0)
        dividing failed: division by zero
    """
    let_through: tuple[type[Exception], ...] = (NothingToWatchError, HDIWarning, *passes)

    def decorate(method: F) -> F:
        @wraps(method)
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # graphs are guarded by all that is read
                return method(self, *args, **kwargs)
            try:
                return method(self, *args, **kwargs)
            except let_through:
                raise
            except Exception as error:
                _report(self, work, error)
            try:
                return None if otherwise is None else otherwise(self)
            except Exception as error:
                _report(self, work, error)
            return None

        return cast("F", called)

    return decorate


def _report(owner: Any, work: str, error: Exception) -> None:
    try:
        owner._failed(work, error)
    except HDIWarning:
        raise
    except Exception:  # there is nobody left to tell
        pass


def attempt_each(actions: Iterable[Callable[[], object]]) -> None:
    """Run each of several actions, even if earlier ones fail.

    Args:
        actions: the actions, in order.

    Raises:
        BaseException: the first failure, or interruption by the user, after all actions were tried.

    Example:
        >>> done = []
        >>> attempt_each([lambda: done.append(1), lambda: 1 / 0, lambda: done.append(3)])
        Traceback (most recent call last):
        ZeroDivisionError: division by zero
        >>> done
        [1, 3]
    """
    first: BaseException | None = None
    for action in actions:
        try:
            action()
        except BaseException as error:  # noqa: PERF203
            first = error if first is None else first
    if first is not None:
        raise first
