"""The draft service: guesses how texts go on, in a process of its own. Run it with `python -m draft_service`."""
