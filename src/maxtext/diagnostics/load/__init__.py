"""A load generator for OpenAI-compatible servers: client, arrivals, report and plot."""
