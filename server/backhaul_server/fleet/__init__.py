"""Fleets: workers that Ray places, one detached actor for each. Does not import torch."""
