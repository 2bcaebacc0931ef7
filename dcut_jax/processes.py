"""Several processes that run one program on one mesh.

All of them run the same host loop on the same outcomes, so all dispatch the same steps.
What differs between them, clocks and files, is the first one's for all.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import jax
import numpy as np
from jax._src import distributed  # has the one barrier that waits for long
from jax.experimental import multihost_utils

from dcut_jax.config import ConfigError

# Compiling takes so long at most.
START_S = 1800.0
_MET = count()
# A process that hangs is missed after this long; one that dies, mostly at once.
HEARTBEAT_S = 30


def join(
    coordinator: str | None, processes: int | None, process_id: int | None
) -> None:
    """Joins the processes of a run, before anything touches a device.

    Without any of the three the run is of one process, and nothing is done.

    Raises:
      ConfigError: some of the three are given, and not all.
    """
    given = (coordinator, processes, process_id)
    if given == (None, None, None):
        return
    if coordinator is None or processes is None or process_id is None:
        raise ConfigError(
            "--coordinator, --processes and --process-id go together; give all three "
            "in every process, or none for a run of one"
        )
    if not 0 <= process_id < processes:
        raise ConfigError(
            f"--process-id {process_id}: expected one of 0 to {processes - 1}, for "
            f"--processes {processes}"
        )
    # It would take SIGTERM for itself, and nobody here asks it.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator, processes, process_id, heartbeat_timeout_seconds=HEARTBEAT_S
    )


def wait_for_all() -> None:
    """Waits until every process is here, however long the others take to compile.

    The first collective waits for half a minute only. Each process calls it as often.
    """
    if several():
        client = distributed.global_state.client
        assert client is not None, "several processes that never joined"
        client.wait_at_barrier(f"dcut-{next(_MET)}", int(START_S * 1e3))


def several() -> bool:
    """Whether this is one process of several."""
    return jax.process_count() > 1


def first() -> bool:
    """Whether this process reports and writes files: the first of them, or the one."""
    return jax.process_index() == 0


def text_of_first(text: str) -> str:
    """The first process's text, in all of them; for start-up."""
    if not several():
        return text
    data = np.frombuffer(text.encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(data.size)))
    padded = np.zeros(size, np.uint8)
    if first():
        padded[:] = data
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded))).decode()


def least(number: int | None) -> int | None:
    """The smallest of all processes' numbers, to 2**20; None if one has none.

    For start-up. `number` is below 2**51.
    """
    if not several():
        return number
    wait_for_all()
    mine = np.int32(-1 if number is None else number >> 20)
    smallest = int(np.min(multihost_utils.process_allgather(mine)))
    return None if smallest < 0 else smallest << 20


@contextmanager
def ends_with_others() -> Iterator[None]:
    """Ends this process where a collective fails, in one line and at once.

    It fails where another process has gone. Leaving in the ordinary way would wait for
    that one.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not several():
            raise
        print(
            f"error: process {jax.process_index()} of {jax.process_count()} ends, for "
            f"a step that all take part in failed; most likely another process has "
            f"ended: look for its error first. Start all of them again. "
            f"({str(error).splitlines()[0]})",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
