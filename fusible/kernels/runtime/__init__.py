"""The runtime of all kernels: device facts, compilation, the disk cache, launches."""
