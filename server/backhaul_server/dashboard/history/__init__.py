"""Runs and steps that outlive the dashboard, in SQLite."""
