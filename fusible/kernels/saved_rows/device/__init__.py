"""Device code of the copies of saved rows."""
