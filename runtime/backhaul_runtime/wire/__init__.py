"""Messages and tensor streams between trainer and worker."""
