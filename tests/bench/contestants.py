"""The contestants of the bench peers: each answers a set of prompts greedily and says how many ids it made.

Owns how each of them is started and asked: the appliance and llama.cpp's servers through HTTP, ``transformers`` by
``generate``. Knows no clock: the bench measures around ``answer``.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import httpx

from appliance.bench.runner import BenchError
from appliance.bench.served import Served, end, free_port, scratch_folder, wait_until_ready
from tests.bench.english import Prompt
from tests.bench.reference_model import ReferenceModel

SLOTS = 8
_TIMEOUT_S = 600.0
_LLAMA_CONTEXT = 4096


class Contestant(Protocol):
    """Answers prompts, all of them at the same time."""

    def answer(self, prompts: Sequence[Prompt], new_tokens: int) -> int:
        """Continue every prompt greedily by ``new_tokens`` ids.

        Returns:
            Ids made, of all prompts together.

        Raises:
            BenchError: it failed.
        """
        ...


class TransformersContestant:
    """``transformers`` on torch: one static batch."""

    def __init__(self, folder: Path, threads: int) -> None:
        """Load the model in a folder of the model store."""
        self._model = ReferenceModel(folder, threads)

    def answer(self, prompts: Sequence[Prompt], new_tokens: int) -> int:
        """See ``Contestant``."""
        rows = self._model.generate([prompt.ids for prompt in prompts], new_tokens)
        return sum(len(row) for row in rows)


class HttpContestant:
    """A server with ``/v1/completions``; one connection a prompt."""

    def __init__(self, url: str) -> None:
        """Ask the server at ``url``."""
        self._client = httpx.Client(base_url=url, timeout=_TIMEOUT_S, limits=httpx.Limits(max_connections=SLOTS))
        self._threads = ThreadPoolExecutor(SLOTS)

    def answer(self, prompts: Sequence[Prompt], new_tokens: int) -> int:
        """See ``Contestant``."""
        if len(prompts) == 1:
            return self._one(prompts[0], new_tokens)
        return sum(self._threads.map(lambda prompt: self._one(prompt, new_tokens), prompts))

    def close(self) -> None:
        """Close every connection."""
        self._threads.shutdown()
        self._client.close()

    def _one(self, prompt: Prompt, new_tokens: int) -> int:
        raise NotImplementedError

    def _post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            answer = self._client.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            raise BenchError(f"{self._client.base_url}: {type(error).__name__}: {error}") from error
        if answer.status_code != 200:
            raise BenchError(f"{self._client.base_url}: {answer.status_code} {answer.text[:300]}")
        return answer.json()

    def _stream(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The last event of a stream."""
        last = ""
        try:
            with self._client.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    raise BenchError(f"{self._client.base_url}: {answer.status_code} {answer.read()[:300]!r}")
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        last = line
        except httpx.HTTPError as error:
            raise BenchError(f"{self._client.base_url}: {type(error).__name__}: {error}") from error
        if not last:
            raise BenchError(f"{self._client.base_url}: the stream ended without an event")
        return json.loads(last.removeprefix("data: "))


class ZccpContestant(HttpContestant):
    """The appliance: ids in; streams with their usage, a whole answer where a single id is asked for."""

    def __init__(self, served: Served) -> None:
        """Ask a running appliance."""
        super().__init__(served.url)
        self._model = served.model

    def _one(self, prompt: Prompt, new_tokens: int) -> int:
        body = {
            "model": self._model, "prompt": prompt.ids, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        if new_tokens == 1:
            return int(self._post(body)["usage"]["completion_tokens"])
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return int(self._stream({**body, **options})["usage"]["completion_tokens"])


class LlamaServerContestant(HttpContestant):
    """llama.cpp's own server: ids in, ``SLOTS`` slots, whole answers, no cache of prompts."""

    def _one(self, prompt: Prompt, new_tokens: int) -> int:
        body = {
            "prompt": prompt.ids, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False,
        }  # fmt: skip
        return int(self._post(body)["usage"]["completion_tokens"])


class LlamaPythonContestant(HttpContestant):
    """llama-cpp-python's server: text in, one request after the other, whole answers; it may end a text early."""

    def _one(self, prompt: Prompt, new_tokens: int) -> int:
        body = {"prompt": prompt.text, "max_tokens": new_tokens, "temperature": 0}
        return int(self._post(body)["usage"]["completion_tokens"])


def llama_command(python: str) -> tuple[tuple[str, ...], str]:
    """How llama.cpp's server is started here, and which one that is.

    Args:
        python: an interpreter that may have llama-cpp-python.

    Returns:
        The command without the model, threads and port, and its name; the command is empty where there is none, and
        the name is then the reason.
    """
    native = shutil.which("llama-server")
    if native:
        return (native,), f"llama.cpp: {native} with {SLOTS} slots"
    probe = "import llama_cpp, llama_cpp.server.app; print(llama_cpp.__version__)"
    try:
        found = subprocess.run([python, "-c", probe], capture_output=True, text=True, check=False, timeout=120)
    except OSError as error:
        return (), f"{python}: {error}"
    if found.returncode:
        return (
            (),
            f"no llama-server on the path, and {python} has no llama_cpp.server (pip install llama-cpp-python[server])",
        )
    version = found.stdout.split()[-1]
    name = f"llama.cpp: llama-cpp-python {version}, whose server answers one request at a time"
    return (python, "-m", "llama_cpp.server"), name


@contextmanager
def llama_server(command: Sequence[str], model: Path, threads: int) -> Iterator[HttpContestant]:
    """Start llama.cpp's server for a GGUF file, give it as a contestant, and end it.

    Raises:
        BenchError: it does not become ready.
    """
    port = free_port()
    common = ("--model", str(model), "--host", "127.0.0.1", "--port", str(port))
    if len(command) == 1:
        slots = ("-np", str(SLOTS), "--ctx-size", str(_LLAMA_CONTEXT * SLOTS), "-t", str(threads), "-tb", str(threads))
        arguments, path, kind = (*common, *slots), "/health", LlamaServerContestant
    else:
        sizes = ("--n_ctx", str(_LLAMA_CONTEXT), "--n_threads", str(threads), "--n_threads_batch", str(threads))
        settings = ("--logits_all", "false", "--interrupt_requests", "false", "--verbose", "false")
        arguments, path, kind = (*common, *sizes, *settings), "/v1/models", LlamaPythonContestant
    with scratch_folder() as scratch:
        log = scratch / "log"
        with log.open("wb") as sink:
            process = subprocess.Popen([*command, *arguments], stdout=sink, stderr=sink)
        try:
            wait_until_ready(process, f"http://127.0.0.1:{port}{path}", log)
            contestant = kind(f"http://127.0.0.1:{port}")
            try:
                yield contestant
            finally:
                contestant.close()
        finally:
            end(process)


DEFAULT_PYTHON = sys.executable
