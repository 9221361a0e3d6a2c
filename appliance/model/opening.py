"""Opening: a path to a checkpoint, whatever format it is in.

Owns the choice between formats. Reads no weight.
"""

from pathlib import Path

from appliance.model.checkpoint import Checkpoint, CheckpointError
from appliance.model.gguf import open_gguf_checkpoint
from appliance.model.safetensors import open_safetensors_checkpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file (or a member of a split set), or a directory with a GGUF or Hugging Face model.

    Args:
        path: a file or a directory.

    Raises:
        CheckpointError: there is no model, or it is damaged or incomplete.
        UnsupportedArchitectureError: the model computes something that is not supported.
    """
    if path.is_file():
        if path.suffix == ".gguf":
            return open_gguf_checkpoint(path)
        raise CheckpointError(
            f"{path}: neither a .gguf file nor a directory; name the GGUF file or the model's directory"
        )
    if not path.is_dir():
        raise CheckpointError(f"{path}: not found; name a GGUF file or a Hugging Face model directory")
    if (path / "config.json").is_file():
        return open_safetensors_checkpoint(path)
    if any(path.glob("*.gguf")):
        return open_gguf_checkpoint(path)
    raise CheckpointError(f"{path}: holds neither config.json nor a .gguf file; name a model's directory")
