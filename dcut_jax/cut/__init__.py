"""What to verify: confidences, survivals, and the plan of a step.

`numpy_plan` and `width` need no JAX, so that another engine can use them.
"""
