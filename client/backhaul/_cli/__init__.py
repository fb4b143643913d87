"""The `backhaul` command, its subcommands and their options. Does not import torch."""
