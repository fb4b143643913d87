"""`backhaul demo` trains a small language model in four ways and checks that all four agree to the last bit."""
