"""What trainer and worker share: programs, replay, tensors as bytes, digests, errors. Knows torch, not gRPC servers."""
