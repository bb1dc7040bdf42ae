"""What can only be tried on a GPU: tests beside torch's own nccl backend, and `./dev gpu`, which
runs all tests of device tensors on CUDA, then the benchmarks, and writes down what came out."""
