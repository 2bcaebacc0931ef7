"""Rows of many requests over their own keys and values, in pages and fresh."""

from pallas_kernels.verify_attention.api import verify_attention
from pallas_kernels.verify_attention.reference import sequence_attention
from pallas_kernels.verify_attention.softmax import Pages

__all__ = ["Pages", "sequence_attention", "verify_attention"]
