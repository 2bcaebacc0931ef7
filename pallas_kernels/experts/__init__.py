"""SwiGLU of many experts over rows sorted by expert."""

from pallas_kernels.experts.api import Backend, grouped_swiglu

__all__ = ["Backend", "grouped_swiglu"]
