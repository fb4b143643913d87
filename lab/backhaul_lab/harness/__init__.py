"""What measurements share: cores and their times, processes, links, trainings that take turns, and charts."""
