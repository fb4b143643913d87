"""The answers of /api/v1. Times are in seconds since 1970. The lists of a series have equal lengths, oldest first."""
