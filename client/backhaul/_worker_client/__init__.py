"""The trainer's side of the wire: connections, uploads, requests and their answers."""
