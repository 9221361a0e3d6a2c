"""The stack that is replaced: a Flask application that answers with ``transformers`` on torch, one request at a time.

Written as its users write it: the model is loaded when a worker starts, a request is parsed, tokenised, generated and
answered on one thread. Reads its model from the environment; knows nothing of the appliance.
"""

import os
import time
import uuid

import torch
import transformers
from flask import Flask, Response, jsonify, request
from transformers.modeling_outputs import CausalLMOutput

DIRECTORY = os.environ["OLD_STACK_MODEL"]  # noqa: TID251 - how such applications are configured
GGUF = {"gguf_file": os.environ["OLD_STACK_GGUF"]} if os.environ.get("OLD_STACK_GGUF") else {}  # noqa: TID251
NULL_MODEL = os.environ.get("OLD_STACK_NULL") == "1"  # noqa: TID251
SAMPLED_ID = 1


class NullModel(transformers.PreTrainedModel, transformers.GenerationMixin):
    """A model whose forward pass costs nothing and likes the same id best: what is left is the stack around it."""

    config_class = transformers.PretrainedConfig
    main_input_name = "input_ids"

    def __init__(self, vocab_size: int) -> None:
        super().__init__(transformers.PretrainedConfig(vocab_size=vocab_size, is_decoder=True, num_hidden_layers=0))
        self.logits = torch.nn.Parameter(torch.zeros(1, 1, vocab_size), requires_grad=False)
        self.logits[..., SAMPLED_ID] = 1.0

    def forward(self, input_ids: torch.Tensor, **_: object) -> CausalLMOutput:
        """The same logits for every row."""
        return CausalLMOutput(logits=self.logits.expand(input_ids.shape[0], 1, -1))


def load_model() -> transformers.PreTrainedModel:
    """The model in float32, as ``from_pretrained`` gives it on a CPU."""
    if NULL_MODEL:
        model = NullModel(len(tokenizer))
        model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0, use_cache=False)
        return model.eval()
    model = transformers.AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32, **GGUF).eval()
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    return model


transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
app = Flask(__name__)
tokenizer = transformers.AutoTokenizer.from_pretrained(DIRECTORY, **GGUF)
model = load_model()


@app.get("/health")
def health() -> Response:
    """For the load balancer."""
    return jsonify(status="ok")


@app.post("/v1/completions")
def completions() -> tuple[Response, int] | Response:
    """A greedy completion of ``max_tokens`` ids."""
    body = request.get_json()
    if not isinstance(body.get("prompt"), str):
        return jsonify(error="prompt must be a text"), 400
    new_tokens = int(body.get("max_tokens", 16))
    inputs = tokenizer(body["prompt"], return_tensors="pt")
    with torch.inference_mode():
        whole = model.generate(
            **inputs, min_new_tokens=new_tokens, max_new_tokens=new_tokens, do_sample=False
        )  # fmt: skip
    prompt_len = inputs["input_ids"].shape[1]
    text = tokenizer.decode(whole[0, prompt_len:], skip_special_tokens=True)
    return jsonify(
        id=f"cmpl-{uuid.uuid4().hex}",
        object="text_completion",
        created=int(time.time()),  # noqa: TID251 - the date of an answer
        choices=[{"index": 0, "text": text, "finish_reason": "length"}],
        usage={"prompt_tokens": prompt_len, "completion_tokens": new_tokens},
    )
