"""The benchmarks of Backhaul: `backhaul bench` measures figures and compares them with their limits."""
