"""The trainer's side of the wire: connections, uploads, requests and their answers."""

import os

# gRPC writes what goes wrong with connections to standard error, in its own words. Ours are in errors and in the log. A
# worker has no others for a handshake that failed, so there they stay.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
