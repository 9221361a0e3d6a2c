"""The console: name, address and health of the host above the prompt, for whoever stands before it.

Owns the text. Shows no secret and lets nobody in.
"""

import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from images.host.seed import REFUSED

ISSUE = Path("/run/issue.d/50-zccp.issue")
PAUSE_S = 5.0


def show() -> None:
    """Keep the text true for as long as the process lives."""
    told = ""
    while True:
        text = f"zccp on {socket.gethostname()}: {_health()}\nhttps://\\4/  version {_version()}\n\n"
        if text != told:
            ISSUE.parent.mkdir(exist_ok=True)
            ISSUE.write_text(text)
            print(text.replace("\\4", _address()).strip(), flush=True)  # to the journal and to every console
            told = text
        # each time: a prompt that is being set up hears nothing, and one whose text is the same is left as it is
        subprocess.run(["agetty", "--reload"], check=False)
        time.sleep(PAUSE_S)


def _health() -> str:
    if REFUSED.is_file():
        return REFUSED.read_text()
    if _is_starting("zccp-model"):
        return "bringing the model in"
    try:
        with urllib.request.urlopen("http://127.0.0.1:8000/health/ready", timeout=5):
            return "ready"
    except urllib.error.HTTPError as error:
        return f"not ready ({error.code})"
    except OSError:
        return "not running; see journalctl -u zccp -u zccp-seed"


def _address() -> str:
    """The address that others reach this host by; its name where there is no way out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # chooses a way and sends nothing
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])


def _is_starting(unit: str) -> bool:
    asked = subprocess.run(["systemctl", "is-active", unit], capture_output=True, text=True, check=False)
    return asked.stdout.strip() == "activating"


def _version() -> str:
    link = Path("/opt/zccp/current")
    return link.resolve().name if link.exists() else "unknown"
