"""The server side: the worker that recomputes, and the dashboard that watches. Never imports the client."""
