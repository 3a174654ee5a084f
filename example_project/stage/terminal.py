"""Lines for a person, with colours where a terminal shows them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from example_project.stage.words import SIGNS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TextIO

_COLOURS = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "blue": "34",
    "magenta": "35",
    "cyan": "36",
}
_OF_SIGN = {sign.character: sign.terminal for sign in SIGNS.values()}


class Terminal:
    """Where the demo speaks.

    Args:
        stream: Where to.
        environ: ``NO_COLOR`` switches colours off, as does a stream that is no tty.
    """

    def __init__(self, stream: TextIO, environ: Mapping[str, str] = os.environ) -> None:
        self._stream = stream
        self._has_colours = stream.isatty() and not environ.get("NO_COLOR")

    def paint(self, text: str, colour: str) -> str:
        """Return the text in a colour, if there are any."""
        if not self._has_colours or not text.strip():
            return text
        return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"

    def print(self, text: str = "") -> None:
        """Print a line at once."""
        print(text, file=self._stream, flush=True)

    def scene(self, number: int, title: str) -> None:
        """Print the title of a scene."""
        self.print(f"\n{self.paint(f'{number}  {title}', 'bold')}")

    def line(self, at: float, sign: str, text: str) -> None:
        """Print what happened, and when in its scene, in seconds."""
        when = self.paint(f"{at:6.2f} s", "dim")
        self.print(
            f"{when}  {self.paint(sign or '·', _OF_SIGN.get(sign, 'dim'))} {text}"
        )

    def verdict(self, claim: str, *, shown: bool) -> None:
        """Print whether a claim was shown."""
        sign = self.paint("✓", "green") if shown else self.paint("✗", "red")
        self.print(f"   {sign} {claim}")
