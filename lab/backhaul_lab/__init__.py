"""Measures, predicts and compares trainings: `backhaul bench`, `experiment`, `plan` and `simulate`."""
