"""Commands of `backhaul` that serve nothing themselves."""
