"""Level 8: argv and the terminal. Nothing imports this room but the doors beside it (`python3 -m
maxtext.train` …).
"""
