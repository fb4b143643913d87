"""The wire: protobuf definitions and their generated stubs, by version."""
