"""`backhaul experiment` runs trainings over a matrix of trainers, workers, speeds and links, and reports on them."""
