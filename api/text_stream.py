"""TextStream: the ids of one choice become the text that a client sees.

Owns the one path from ids to text, used by streams and whole answers alike: the decoder holds back bytes that do not
yet form a character, the stop matcher holds back characters that may turn out to be the beginning of a stop string.

A stop string counts as found as soon as its last character arrives; of several that end with the same character the
longest wins. This does not depend on how the text is cut into ids.
"""

from collections.abc import Sequence

from api.ports import TokenDecoder


class StopMatcher:
    """Finds the first of several stop strings in a text that comes in pieces.

    Each stop string has one automaton whose state is the length of its longest prefix that ends the text so far, so the
    work is one step a character and stop string, whatever their lengths.

    Source: Knuth, Morris, Pratt, "Fast pattern matching in strings", SIAM J. Comput. 6 (1977).
    """

    __slots__ = ("_failures", "_held", "_keep_found", "_states", "_stops", "found")

    def __init__(self, stops: Sequence[str], *, keep_found: bool = False) -> None:
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._keep_found = keep_found
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The part of the text that is now certain to be visible; empty once a stop string was found."""
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        for position, character in enumerate(text):
            for index, stop in enumerate(self._stops):
                if self._step(index, stop, character):
                    self.found = stop
                    seen = self._held + text[: position + 1]
                    self._held = ""
                    return seen if self._keep_found else seen[: -len(stop)]
        pending = self._held + text
        kept = max(self._states)
        self._held = pending[len(pending) - kept :]
        return pending[: len(pending) - kept]

    def flush(self) -> str:
        """What was held back; the text has ended, so it begins no stop string."""
        held, self._held = self._held, ""
        return held

    def _step(self, index: int, stop: str, character: str) -> bool:
        state, failure = self._states[index], self._failures[index]
        while state and stop[state] != character:
            state = failure[state - 1]
        if stop[state] == character:
            state += 1
        self._states[index] = state
        return state == len(stop)


class TextStream:
    """Text of one choice.

    ``decoded`` counts the characters that the ids so far have given, visible or held.
    """

    __slots__ = ("_decoder", "_matcher", "decoded")

    def __init__(self, decoder: TokenDecoder, stops: Sequence[str] = (), *, include_stop: bool = False) -> None:
        self._decoder = decoder
        self._matcher = StopMatcher(stops, keep_found=include_stop)
        self.decoded = 0

    @property
    def found(self) -> str | None:
        """The stop string that ended the text; None while there was none."""
        return self._matcher.found

    def push(self, token_id: int) -> str:
        """The text that an id makes visible; may be empty."""
        text = self._decoder.push(token_id)
        self.decoded += len(text)
        return self._matcher.push(text) if text else ""

    def flush(self) -> str:
        """The rest of the text; call once, at the end."""
        if self.found is not None:
            return ""
        text = self._matcher.push(self._decoder.flush())
        return text + self._matcher.flush()


def _failure_table(stop: str) -> list[int]:
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length - 1]
        if stop[index] == stop[length]:
            length += 1
        table[index] = length
    return table
