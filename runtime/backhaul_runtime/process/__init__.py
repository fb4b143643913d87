"""The process and its environment: addresses, credentials, settings, logs."""
