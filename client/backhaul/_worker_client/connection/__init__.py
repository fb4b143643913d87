"""The connections to one worker, what they share, and the calls over them."""
