"""Device code, traced by the CuTe DSL."""
