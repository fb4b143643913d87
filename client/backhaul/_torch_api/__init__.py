"""What mirrors or patches the API of torch: options, wrappers, selective checkpointing, FSDP2."""
