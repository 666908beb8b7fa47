"""Level 8: argv and the terminal. Only the entry modules import it (`python3 -m maxtext.train` …)."""
