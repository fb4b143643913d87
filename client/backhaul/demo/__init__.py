"""The demo: a small language model trained four ways."""
