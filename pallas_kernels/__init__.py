"""Kernels of batched speculative decoding; each knows arrays, nothing of models.

One folder per operation: `api.py` is what callers use, `reference.py` the short obvious
form, `kernel.py` the Pallas form, `cases.py` the inputs that tests and benches share.
`backends.py` names the forms, says which of them a device can run, and which is its own
by default.
"""
