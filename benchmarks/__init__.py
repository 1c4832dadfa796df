"""Benchmarks: `make bench` lists them, `make bench NAME=lookup` runs one. Never part of the tests: they are noisy."""
