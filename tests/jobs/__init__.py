"""Jobs of ranks that several files of tests run, on CPU tensors or on a device."""
