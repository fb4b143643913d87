"""Counts, reports and traces what happens to segments."""
