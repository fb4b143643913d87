"""The parts that mirror or patch torch's API: options, wrappers, selective checkpointing and FSDP2."""
