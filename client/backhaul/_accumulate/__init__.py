"""Backward passes that finish later: `Session.accumulate`."""
