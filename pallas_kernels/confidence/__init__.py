"""The most likely word of a language model's head, and how sure it is of it."""

from pallas_kernels.confidence.api import Confidence, head_confidence
from pallas_kernels.confidence.reference import from_logits

__all__ = ["Confidence", "from_logits", "head_confidence"]
