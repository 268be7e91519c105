"""The `wbridge` command."""
