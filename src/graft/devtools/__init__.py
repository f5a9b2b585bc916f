"""What those use who fit a model of the stack or look for wrong code; no command needs it."""
