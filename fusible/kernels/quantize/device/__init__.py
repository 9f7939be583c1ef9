"""Device code of the quantizers, in the CuTe DSL; importing it imports cutlass."""
