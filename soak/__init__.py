"""The abuse suite: real processes under all that users, drafters and operators may do to them."""
