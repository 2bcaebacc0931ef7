"""What goes wrong with files of weights."""


class CheckpointError(ValueError):
    """A checkpoint that is missing, broken, or does not fit its own description.

    The message names the file, and the tensor where one is at fault.
    """
