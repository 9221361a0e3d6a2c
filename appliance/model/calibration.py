"""Calibration ids: the text that travels with the package, encoded by a model's own tokenizer.

Owns the cut into windows. The text is a mix of prose, dialogue, code, data and languages; what is wanted of it is the
usual correlation of a layer's inputs, not any knowledge.
"""

from importlib import resources
from pathlib import Path

import numpy as np

from appliance.model.codec import Codec

WINDOW = 1024
"""Ids of a window; each is read as a text of its own."""


def calibration_ids(folder: Path, window: int = WINDOW) -> np.ndarray:
    """int32 [windows, window] ids for the model in a folder; the rest that fills no window is left out.

    Raises:
        TokenizerError: the folder holds no tokenizer that can be used.
    """
    text = resources.files("appliance.model").joinpath("calibration.txt").read_text(encoding="utf-8")
    ids = Codec.load(folder).encode(text, parse_special=False)
    count = len(ids) // window
    return np.asarray(ids[: count * window], np.int32).reshape(count, window)
