"""What only a GPU can tell about Backhaul, in one run: see `gpu-check.sh`."""
