"""SwiGLU of many experts over rows sorted by expert."""

from pallas_kernels.experts.api import grouped_swiglu

__all__ = ["grouped_swiglu"]
