"""`backhaul plan`: searches the settings with which a model trains fastest within a budget of memory."""
