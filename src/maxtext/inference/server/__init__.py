"""The HTTP server: OpenAI's API over an `AsyncEngine`."""
