"""What all kernels share: device facts, compilation, the disk cache, launches."""
