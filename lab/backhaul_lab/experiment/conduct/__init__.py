"""Runs the cells of an experiment, records them, and continues an interrupted run."""
