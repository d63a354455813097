"""Benchmarks that need a CUDA device; each part prints a table and returns values for JSON. See `__main__`."""
