"""Kernels of batched speculative decoding; each knows arrays, nothing of models.

One folder per operation: `api.py` is what callers use, `reference.py` the short obvious
form, `kernel.py` the Pallas form, `cases.py` the inputs that tests and benches share.
"""

from typing import Literal

# xla: the reference. pallas: the real kernel, on the platform the program is lowered
# for. pallas_interpret: the same kernel as ordinary XLA, to test it on any device.
Backend = Literal["xla", "pallas", "pallas_interpret"]
