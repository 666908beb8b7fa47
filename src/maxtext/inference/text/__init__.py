"""From token ids to text and messages: sessions, detokenizing, streams, parsers."""
