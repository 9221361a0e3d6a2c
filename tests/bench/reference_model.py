"""The stored model as ``transformers`` runs it: float32 on the CPU, on the same dequantised weights.

Owns how the model's own files are opened with torch, and the three things benches ask of it: logits, greedy ids, and
``generate`` as its users call it.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers

from appliance.model.record import read_record


class ReferenceModel:
    """One model in memory; greedy, without any stop."""

    def __init__(self, folder: Path, threads: int | None = None) -> None:
        """Load the model in a folder of the model store; ``threads`` is for all of torch."""
        if threads is not None:
            torch.set_num_threads(threads)
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        source = folder / read_record(folder).source_path
        directory = source.parent if source.is_file() else source
        gguf = {"gguf_file": source.name} if source.is_file() else {}
        self._model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **gguf).eval()
        self._model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """float32 [ids, vocab]: what follows each position."""
        with torch.inference_mode():
            return self._model(torch.tensor([list(ids)]), use_cache=False).logits[0].float().numpy()

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        """Exactly ``new_tokens`` greedy ids for each prompt of a batch; the prompts have one length."""
        batch = torch.tensor([list(prompt) for prompt in prompts])
        with torch.inference_mode():
            whole = self._model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                do_sample=False,
            )
        return whole[:, batch.shape[1] :].tolist()
