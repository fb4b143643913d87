"""`backhaul demo`: a small language model trained four ways, and whether all four are the same to the last bit."""
