"""`backhaul doctor`: checks an installation and a worker, and says whether the worker pays for a model."""
