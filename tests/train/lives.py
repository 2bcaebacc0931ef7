"""Trains a run that is killed again and again: `lives.py CONFIG KILLS`.

KILLS is a JSON list of `[lines, seconds]`: a life is ended by SIGKILL so long after it
has printed so many lines; one of `[null, 0]` ends by itself. A line of JSON says how
many lines each printed, and whether it was killed.

Lives are forks of this process, which has imported everything and run nothing.
"""

import json
import os
import signal
import sys
import threading
import time

from dcut_jax.train.__main__ import main


def live(config, lines, seconds):
    """One life."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(write, 1)
        os.close(read)
        os.close(write)
        status = 1
        try:
            status = main(["run", config])
        finally:
            os._exit(status)
    os.close(write)

    def end():
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=end)
    seen = 0
    with os.fdopen(read) as printed:
        if lines == 0:
            killer.start()
        for _ in printed:
            seen += 1
            if seen == lines:
                killer.start()
    # Not yet waited for, so the number is still its own and a late kill hits nobody.
    if killer.ident is not None:
        killer.join()
    _, status = os.waitpid(pid, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if not killed and os.waitstatus_to_exitcode(status):
        sys.exit(f"a life ended with {os.waitstatus_to_exitcode(status)}")
    return {"lines": seen, "killed": killed}


config, kills = sys.argv[1], json.loads(sys.argv[2])
print(json.dumps([live(config, lines, seconds) for lines, seconds in kills]))
