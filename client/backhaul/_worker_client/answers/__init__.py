"""Receives and checks what a worker answers."""
