"""How old a process is, by the kernel's own account."""

import os
import subprocess
import sys
import time

from appliance.host.process import age_s

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
SCRIPT = "import time; time.sleep(0.05); from appliance.host.process import age_s; print(age_s())"


def test_a_process_is_as_old_as_the_kernel_says() -> None:
    began_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert 0.05 - TICK_S <= float(done.stdout) <= time.monotonic() - began_s + 2 * TICK_S


def test_age_rises() -> None:
    first = age_s()
    assert first > 0
    assert age_s() >= first
