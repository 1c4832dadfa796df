"""Generated from protos/draftwire/v1 by `make protos`; never edited."""
