"""Turns the records of an experiment into one HTML file and Markdown. Pure."""
