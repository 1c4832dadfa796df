"""The prefix cache: rows of prompts and answers that later prompts begin with, in memory and on disk."""
