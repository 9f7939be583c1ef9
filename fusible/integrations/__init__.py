"""Adapters for other projects, each imported by its name only."""
