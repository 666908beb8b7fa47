"""Parsers of what a model writes: reasoning, content and tool calls, as the text comes."""
