"""A simulated CUDA device for tests on machines without a GPU. See README.md beside this file."""
