"""Calibration ids: the text that travels with the package, encoded as a model will meet text.

Owns the cut into windows. The text is a mix of prose, dialogue, code, data and languages; what is wanted of it is the
usual correlation of a layer's inputs, not any knowledge. A model with a chat template reads half of the windows as
conversations, since control tokens give inputs of their own.
"""

from importlib import resources
from pathlib import Path

import numpy as np

from api.ports import ChatMessage, ChatTemplateError
from appliance.model.codec import Codec

WINDOW = 1024
"""Ids of a window; each is read as a text of its own."""

MAX_WINDOWS = 6
"""Most windows of each of the two kinds, spread over the text; more give no better weights and take longer."""

_TURN_CHARACTERS = 600


def calibration_ids(folder: Path, window: int = WINDOW) -> np.ndarray:
    """int32 [windows, window] ids for the model in a folder.

    Raises:
        TokenizerError: the folder holds no tokenizer that can be used.
    """
    text = resources.files("appliance.model").joinpath("calibration.txt").read_text(encoding="utf-8")
    codec = Codec.load(folder)
    ids = codec.encode(text, parse_special=False).tolist()
    count = len(ids) // window
    plain = [ids[start * window : (start + 1) * window] for start in range(count)]
    return np.asarray(_spread(plain) + _spread(_conversations(codec, text, window)), np.int32)


def _spread(windows: list[list[int]]) -> list[list[int]]:
    step = max(1, len(windows) // MAX_WINDOWS)
    return windows[::step][:MAX_WINDOWS]


def _conversations(codec: Codec, text: str, window: int) -> list[list[int]]:
    """Windows that each begin a conversation whose turns are consecutive paragraphs; none without a chat template."""
    turns = _turns(text)
    windows: list[list[int]] = []
    while turns:
        messages: list[ChatMessage] = []
        ids: list[int] = []
        while turns and len(ids) < window:
            role = "user" if len(messages) % 2 == 0 else "assistant"
            messages.append(ChatMessage(role=role, content=turns.pop(0)))
            try:
                ids = codec.encode_chat(messages).tolist()
            except ChatTemplateError:
                return []
        if len(ids) >= window:
            windows.append(ids[:window])
    return windows


def _turns(text: str) -> list[str]:
    """Paragraphs, short ones joined, as turns of a conversation."""
    turns: list[str] = []
    for paragraph in text.split("\n\n"):
        if turns and len(turns[-1]) + len(paragraph) < _TURN_CHARACTERS and len(turns) % 2 == 0:
            turns[-1] += f"\n\n{paragraph}"
        else:
            turns.append(paragraph)
    return turns
