"""`backhaul demo` trains a small language model in five ways and checks that all five agree to the last bit."""
