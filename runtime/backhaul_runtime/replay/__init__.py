"""Runs programs again, measures what replays take, and schedules them."""
