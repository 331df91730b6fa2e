"""`SharedProducts`: products of heads that one source of a reading leaves for another, within a budget."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hdi_callback.attention import Role
from hdi_callback.core.products import HeadProducts


class SharedProducts:
    """Keep products from the source that forms them to the one that uses them up, in one reading.

    Args:
        budget: bytes of products that are kept at a time; what goes beyond is formed again.
        roles: of the weights whose products are used again.

    Attributes:
        budget: the same.
        roles: the same.
    """

    def __init__(self, budget: int, roles: frozenset[Role]) -> None:
        self.budget, self.roles = budget, roles
        self._kept: dict[tuple[str, Role], HeadProducts] = {}
        self._bytes = 0
        self._unused: dict[Role, Collection[str]] = {}

    def begin(self, unused: Mapping[Role, Collection[str]]) -> None:
        """Begin a reading with nothing.

        Args:
            unused: by role the layers whose products this reading does not use again.
        """
        self.forget()
        self._unused = dict(unused)

    def is_used(self, layer: str, role: Role) -> bool:
        """Return whether the products of a layer's heads are used again.

        Args:
            layer: its name.
            role: of the weight.

        Returns:
            True if they are.
        """
        return role in self.roles and layer not in self._unused.get(role, ())

    def keep(self, layer: str, role: Role, products: HeadProducts | None) -> None:
        """Keep the products of a layer's heads.

        Args:
            layer: its name.
            role: of the weight.
            products: of its heads; `None` if there are none.
        """
        if products is None or not self.is_used(layer, role) or self._bytes + products.nbytes > self.budget:
            return
        self._kept[layer, role] = products
        self._bytes += products.nbytes

    def take(self, layer: str, role: Role) -> HeadProducts | None:
        """Give the products of a layer's heads away.

        Args:
            layer: its name.
            role: of the weight.

        Returns:
            What was kept; `None` if nothing was.
        """
        products = self._kept.pop((layer, role), None)
        self._bytes -= 0 if products is None else products.nbytes
        return products

    def forget(self) -> None:
        """Let go of what nobody took."""
        self._kept.clear()
        self._bytes = 0
