"""The gRPC services of a worker: authentication, limits, and messages in and out."""
