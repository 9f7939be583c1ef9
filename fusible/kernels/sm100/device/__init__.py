"""Device code of ours for SM100, which uses nothing that Hopper has not."""
