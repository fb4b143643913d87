"""Sends segments and tensors to one worker."""
