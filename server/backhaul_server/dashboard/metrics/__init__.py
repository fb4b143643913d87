"""Prometheus metrics and alert rules."""
