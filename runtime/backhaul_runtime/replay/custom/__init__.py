"""Replays custom autograd functions and ops of other libraries: `CustomExecution`."""
