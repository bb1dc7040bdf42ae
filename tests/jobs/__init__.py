"""Jobs of ranks that several files of tests run: on CPU tensors, on a device, with other faults."""
