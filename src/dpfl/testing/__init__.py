"""Laws that every plug must pass, ours or a stranger's."""
