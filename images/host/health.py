"""Health: whether the appliance answers through nginx, as the condition for a new version to stay.

Owns the question and what follows. A version on trial that does not become healthy is left by a restart; the boot
loader goes back to the proven one when its tries are used up. A proven version is left alone: restarting it again and
again would help nobody.
"""

import json
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import IO

from images.host.seed import DATA, PROBE
from images.host.slots import on_trial

LIMIT_S = 1500.0
PAUSE_S = 2.0
ANSWER_S = 300.0
_URL = "https://127.0.0.1"
_NEEDED = ("zccp-seed.service", "zccp-model.service", "zccp.service", "nginx.service")
"""One of these having failed is enough; what waits for one that failed is inactive, not failed."""


def check(limit_s: float = LIMIT_S) -> str | None:
    """Wait until the appliance is ready and has answered a request; None then, else what was wrong last."""
    deadline_s, wrong = time.monotonic() + limit_s, "it was not asked"
    while time.monotonic() < deadline_s:
        wrong = _ask()
        if wrong is None:
            return None
        if _given_up():
            return f"a unit that it needs has failed, see systemctl --failed; {wrong}"
        time.sleep(PAUSE_S)
    return wrong


def decide(wrong: str | None) -> int:
    """The exit code; a version on trial that failed is left by a restart."""
    if wrong is None:
        return 0
    print(f"the appliance is not healthy: {wrong}", file=sys.stderr)
    if on_trial():
        print("this version is on trial; restarting: with no try left the one before comes back", file=sys.stderr)
        subprocess.run(["systemctl", "reboot"], check=False)
    return 1


def _given_up() -> bool:
    """Whether the manager starts the appliance no more: it failed, or what it needs did."""
    return subprocess.run(["systemctl", "is-failed", "--quiet", *_NEEDED], check=False).returncode == 0


def _ask() -> str | None:
    context = ssl.create_default_context(cafile=str(DATA / "tls/fullchain.pem"))
    context.check_hostname = False  # a certificate for a name is asked for at the loopback
    try:
        with urllib.request.urlopen(f"{_URL}/health/ready", timeout=10, context=context):
            pass
        headers = {"content-type": "application/json", "authorization": f"Bearer {PROBE.read_text()}"}
        models = json.load(_open("/v1/models", None, headers, context))
        body = {"model": models["data"][0]["id"], "prompt": "ready", "max_tokens": 2}
        answer = json.load(_open("/v1/completions", json.dumps(body).encode(), headers, context))
        return None if answer["usage"]["completion_tokens"] else f"it answered {answer!r:.200}"
    except urllib.error.HTTPError as error:
        return f"{error.url}: {error.code} {error.read(300)!r}"
    except (OSError, ValueError, KeyError) as error:
        return f"{_URL}: {error}"


def _open(path: str, body: bytes | None, headers: dict[str, str], context: ssl.SSLContext) -> IO[bytes]:
    request = urllib.request.Request(_URL + path, body, headers)
    return urllib.request.urlopen(request, timeout=ANSWER_S, context=context)
