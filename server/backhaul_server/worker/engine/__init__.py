"""What a worker holds and runs: sessions, segments, the store, and the thread that runs programs."""
