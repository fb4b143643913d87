"""`backhaul bench`: what Backhaul costs and spares, each figure beside its limit."""
