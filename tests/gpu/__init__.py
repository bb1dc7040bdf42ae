"""Tests that need a GPU: comparisons with torch's own nccl backend, and `./dev gpu`, which runs all
tests of device tensors on CUDA and the benchmarks, and writes a page of results."""
