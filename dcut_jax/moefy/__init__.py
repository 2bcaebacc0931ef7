"""Makes a mixture of experts of a dense target's own neurons.

Not a better model: a real one, whose routing depends on the text, and that is the dense
one when all its experts run.
"""
