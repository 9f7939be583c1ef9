"""Device code of the dense backwards."""
