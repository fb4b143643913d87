"""Polls workers and keeps what they and their trainers report, within bounds."""
