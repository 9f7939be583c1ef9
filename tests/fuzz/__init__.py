"""A differential fuzzer: random programs on the package's ops and on independent references."""
