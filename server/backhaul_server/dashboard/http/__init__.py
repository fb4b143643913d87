"""The HTTP server: routes, the event stream, authentication and static files."""
