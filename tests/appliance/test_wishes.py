"""Signals: SIGHUP asks for a reload, but the end of the terminal asks for the end."""

import subprocess
import sys

PROGRAM = """
import fcntl, os, pty, selectors, signal, termios
from appliance.wishes import Wishes
master, slave = pty.openpty()
fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
selector = selectors.DefaultSelector()
wishes = Wishes(selector)
def wait():
    while not selector.select(10):
        pass
    wishes.wake()
with wishes.heard():
    os.kill(os.getpid(), signal.SIGHUP)
    wait()
    assert (wishes.stops, wishes.take_reload(), wishes.take_reload()) == (0, True, False)
    os.close(master)
    wait()
    assert (wishes.stops, wishes.take_reload()) == (1, False)
    os.kill(os.getpid(), signal.SIGTERM)
    assert wishes.stops == 2
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with wishes.heard():
    os.kill(os.getpid(), signal.SIGHUP)
    assert not wishes.take_reload()
print("done")
"""


def test_a_terminal_that_goes_ends_what_was_started_on_it() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, start_new_session=True, capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.stderr) == ("done\n", "")
