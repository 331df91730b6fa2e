"""The README as a package index shows it, where relative links lead nowhere.

With a ``Repository`` under ``[project.urls]``, links and pictures get its address, at the tag of the version. Without
one, a link becomes its words with the path in the source distribution, and a picture goes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def for_an_index(text: str, repository: str | None, version: str) -> str:
    """Rewrite the relative links of a page.

    Args:
        text: Markdown.
        repository: address of the repository, as GitHub lays it out; None if it has none.
        version: of the package, whose tag is ``v<version>``.

    Returns:
        Markdown without relative links.
    """

    def rewrite(match: re.Match[str]) -> str:
        picture, words, path, anchor = match.groups(default="")
        if repository is None:
            return "" if picture else words if words == path else f"{words} (`{path}`)"
        kind = "raw" if picture else "blob"
        return f"{picture}[{words}]({repository.rstrip('/')}/{kind}/v{version}/{path}{anchor})"

    return re.sub(r"\n{3,}", "\n\n", _LINK.sub(rewrite, text))


class ReadmeHook(MetadataHookInterface):
    """Gives the metadata their README."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the README.

        Args:
            metadata: the table ``[project]``, to change in place.
        """
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository")
        readme = for_an_index(text, repository, str(metadata["version"]))
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}
