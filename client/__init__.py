"""The `draftwire` command line: a program on top of the client library."""
