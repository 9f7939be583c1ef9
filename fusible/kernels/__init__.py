"""How it runs fast: kernel contracts, library ops, device code."""
